"""What `eaas up` prints once the cluster serves: the endpoint, and commands to try."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.config.environment import KEY_VARIABLE
from eaas.log import print_line
from eaas_cli.commands.client import page_address
from eaas_cli.local.process import program

if TYPE_CHECKING:
    from eaas.config import ClusterConfig
    from eaas_cli.local.interface import LaunchedCluster

__all__ = ["greet", "key_file", "passes_text"]


def greet(
    cluster: LaunchedCluster, kernels: Mapping[str, str | None], passes: str, logs: str, trial: str
) -> None:
    """Print the endpoint and the commands to try.

    Args:
        cluster: The cluster.
        kernels: Kernel that each expert server announced; None for other processes.
        passes: Text on compiled forward passes (`passes_text`); empty: nothing to say.
        logs: Where the logs are.
        trial: What to try, and how the cluster ends.
    """
    config = cluster.config.frontend
    body = json.dumps(
        {
            "model": config.model_names(cluster.model)[0],
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 32,
        }
    )
    file = key_file(cluster.config)
    status = [*program(), "status", "--endpoint", cluster.endpoint]
    key = f'"${KEY_VARIABLE}"' if KEY_VARIABLE in os.environ else None
    if file is not None:
        status += ["--api-key-file", str(file.resolve())]
        key = f'"$(grep -m 1 "^[^#]" {shlex.quote(str(file.resolve()))})"'
    # Print a reference to the key's file, so that neither the screen nor a command line shows the key.
    shown = f" -H @<(printf 'Authorization: Bearer %s' {key})" if key else ""
    page = f"page:     {page_address(cluster.page)}\n" if config.dashboard and cluster.page else ""
    url = f"{cluster.endpoint}/v1/chat/completions"
    print_line(f"""
kernel:   {_kernels(kernels)}
{passes}endpoint: {cluster.endpoint}/v1
{page}status:   {shlex.join(status)}
logs:     {logs}

curl -s{shown} {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}

Try it: {trial}
""")


def passes_text(engine: str, config: ClusterConfig) -> str:
    """Say what a machine without a C++ compiler costs an embedded engine, in one line; else nothing."""
    if engine == "vllm" or not config.attention_client.compile or shutil.which("g++"):
        return ""
    return "passes:   uncompiled, because g++ is missing: one stream has about 0.6 of its speed\n"


def key_file(config: ClusterConfig) -> Path | None:
    """The file with the endpoint's API keys, if there is one."""
    file = config.frontend.api_key_file
    return Path(file) if file else None


def _kernels(announced: Mapping[str, str | None]) -> str:
    """Text on the expert servers' kernels, by server if they differ."""
    servers: dict[str, list[str]] = {}
    for name, kernel in announced.items():
        if kernel is not None:
            servers.setdefault(kernel, []).append(name)
    if len(servers) == 1:
        return next(iter(servers))
    return "; ".join(f"{', '.join(names)}: {kernel}" for kernel, names in servers.items())

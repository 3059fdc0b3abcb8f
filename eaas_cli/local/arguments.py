"""For `eaas up`, here and on Ray: each role's arguments, and checks before a process starts."""

from __future__ import annotations

import errno
import socket
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.errors import ConfigError, PortInUseError

if TYPE_CHECKING:
    from eaas.config import ClusterConfig

__all__ = [
    "balancer_words",
    "check_endpoint_port",
    "client_words",
    "frontend_words",
    "make_log_dir",
    "monitor_words",
    "refuse_few_servers",
    "refuse_missing_vllm",
    "server_words",
    "vllm_words",
]

_INSTALL = (
    "`make setup-vllm` makes an environment with vLLM and this package, or: "
    "pip install 'expert-as-a-service[server,vllm]' beside vLLM"
)


def monitor_words(config: ClusterConfig) -> tuple[str, ...]:
    """Arguments of the `eaas monitor` process, which stops the members when it ends."""
    monitor = config.monitor
    data = ("--data-dir", str(Path(monitor.data_dir).resolve())) if monitor.data_dir else ()
    words = ("monitor", "--host", monitor.host, "--port", str(monitor.port))
    return (*words, *data, "--stop-members-on-exit")


def server_words(
    config: ClusterConfig,
    name: str,
    monitor: str,
    model: Path | None,
    threads: int | str,
    core: int | None = None,
    device: str | None = None,
) -> tuple[str, ...]:
    """Arguments of an `eaas expert-server` process. Without a model, other servers send it the weights."""
    server = config.expert_server
    return (
        *("expert-server", "--id", name),
        *(("--model", str(model)) if model else ()),
        *("--join", monitor, "--threads", str(threads)),
        *(() if core is None else ("--core", str(core))),
        *(() if device is None else ("--device", device)),
        *("--kernel", server.kernel, "--quantization", server.quantization),
    )


def balancer_words(monitor: str, servers: int, redundancy: int) -> tuple[str, ...]:
    """Arguments of the `eaas balancer` process. It waits for `servers` before it first places the experts."""
    counts = ("--servers", str(servers), "--redundancy", str(redundancy))
    return ("balancer", "--join", monitor, *counts)


def client_words(config: ClusterConfig, name: str, monitor: str, model: Path) -> tuple[str, ...]:
    """Arguments of an `eaas attention-client` process, an engine for the frontend."""
    client = config.attention_client
    return (
        *("attention-client", "--id", name, "--model", str(model), "--join", monitor),
        *("--transport", client.transport, "--engine-host", client.engine_host),
    )


def frontend_words(
    config: ClusterConfig,
    name: str,
    monitor: str,
    model: Path,
    *,
    operator_page: bool,
    page_only: bool = False,
) -> tuple[str, ...]:
    """Arguments of the `eaas frontend` process, which serves the HTTP endpoint.

    `page_only`: vLLM serves it, and the frontend serves the page at a free port.
    """
    port = 0 if page_only else config.frontend.port
    return (
        *("frontend", "--id", name, "--model", str(model), "--join", monitor),
        *(("--page-only",) if page_only else ()),
        *(("--operator-page",) if operator_page else ()),
        *_endpoint_words(config, port),
    )


def vllm_words(config: ClusterConfig, name: str, monitor: str, model: Path) -> tuple[str, ...]:
    """Arguments of the `eaas vllm` process, which serves the HTTP endpoint."""
    transport = ("--transport", config.attention_client.transport)
    options = _endpoint_words(config, config.frontend.port)
    return ("vllm", str(model), "--id", name, "--join", monitor, *transport, *options)


def _endpoint_words(config: ClusterConfig, port: int) -> tuple[str, ...]:
    frontend = config.frontend
    keys = ("--api-key-file", str(Path(frontend.api_key_file).resolve()))
    return (
        *("--host", frontend.host, "--port", str(port)),
        *(keys if frontend.api_key_file else ()),
        *(word for name in frontend.served_model_name for word in ("--served-model-name", name)),
    )


def refuse_few_servers(servers: int, redundancy: int, *, on_devices: bool = False) -> None:
    """Raise ConfigError if there are fewer servers than replicas of each expert.

    `on_devices`: each server has a GPU, so that `--devices` gives their number.
    """
    if redundancy > servers:
        remedy = (
            f"give --redundancy {servers}, or more --devices"
            if on_devices
            else f"give --servers {redundancy}, or a lower --redundancy"
        )
        raise ConfigError(
            f"--redundancy {redundancy} needs as many servers, and there are {servers}: {remedy}"
        )


def refuse_missing_vllm() -> None:
    """Raise ConfigError unless this environment has a supported vLLM that finds this package's plugin."""
    from attention_client.engines.vllm.contract import LOAD_FORMAT, refuse_unsupported

    try:
        refuse_unsupported()
    except ConfigError as error:
        raise ConfigError(f"--engine vllm: {error}; {_INSTALL}") from error
    if not any(p.name == LOAD_FORMAT for p in entry_points(group="vllm.general_plugins")):
        raise ConfigError(f"--engine vllm: vLLM does not find this package's plugin; {_INSTALL}")


def make_log_dir(wanted: Path) -> None:
    """Create the directory of the child processes' logs; check it. Raises ConfigError if it is unusable."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError as error:
        raise ConfigError(
            f"--log-dir {wanted}: {error.strerror}; give another directory"
        ) from error


def check_endpoint_port(host: str, port: int) -> int:
    """Check that the HTTP endpoint can listen at an address, before any process starts; return the port.

    Args:
        host: Address of this machine.
        port: 0: a free one.

    Raises:
        ConfigError: It is no address of this machine, or the port needs more rights.
        PortInUseError: Another process listens there.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host}: {error.strerror}; give an address of this machine"
        ) from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            return int(probe.getsockname()[1])
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"--host {host}: {error.strerror}; give an address of this machine"
                ) from error
            where = f"{host}:{port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"{where}; choose another with --port, or stop what holds it"
                ) from error
            raise ConfigError(f"{where}; choose another with --port") from error

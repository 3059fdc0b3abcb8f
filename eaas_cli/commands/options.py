"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.checkpoint.source import local_directory
from eaas.config.environment import ENDPOINT_VARIABLE
from eaas.errors import ConfigError
from eaas_cli.local.running_clusters import chosen

__all__ = [
    "DEFAULT_ENDPOINT",
    "MODEL_HELP",
    "ApiKeyFile",
    "ConfigFile",
    "DemoModel",
    "Endpoint",
    "Insecure",
    "Join",
    "Json",
    "KeyToShow",
    "Model",
    "Tls",
    "Transport",
    "as_url",
    "check_join",
]

DEFAULT_ENDPOINT = "http://127.0.0.1:8000"
"""Default endpoint of `eaas up`."""

MODEL_HELP = (
    "Directory of a Hugging Face MoE checkpoint, or its name in the cache of huggingface_hub."
)
Model = Annotated[
    Path,
    typer.Option(
        "--model",
        help=MODEL_HELP,
        parser=local_directory,
        metavar="DIR|ORG/NAME",
        show_default=False,
    ),
]
DemoModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Checkpoint.",
        parser=local_directory,
        metavar="DIR|ORG/NAME",
        show_default="a demo checkpoint",
    ),
]
Transport = Annotated[str, typer.Option(help="Transport to the servers: auto, shm, grpc or nixl.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="cluster.yaml: settings of every role.", show_default=False),
]


def check_join(given: str | None) -> str | None:
    """Check the addresses of --join. Raises ConfigError: one is not HOST:PORT."""
    for address in given.split(",") if given is not None else ():
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(
                f"--join {given}: give HOST:PORT, the address of the monitor in `eaas status`"
            )
    return given


Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="HOST:PORT[,...]",
        callback=check_join,
        help="Address of the cluster's monitor; of all monitors if there are several.",
        show_default=False,
    ),
]


def _find_endpoint(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    """Choose the endpoint: the given one, else that of this user's only cluster, else the default."""
    source = context.get_parameter_source(str(parameter.name))
    # With --join the endpoint is not used.
    if source is None or source.name != "DEFAULT" or context.params.get("join"):
        return as_url(given)
    up = chosen()
    return given if up is None else up.endpoint


def as_url(endpoint: str) -> str:
    """Add the `http://` that people leave out of an endpoint."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="HTTP endpoint of the cluster.",
        show_default=f"your only cluster, else {DEFAULT_ENDPOINT}",
        envvar=ENDPOINT_VARIABLE,
        callback=_find_endpoint,
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Directory of certificates (`eaas certs`).",
        show_default="no TLS",
        envvar="EAAS_SECURITY__TLS_DIR",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Let other machines connect without TLS and use the endpoint without an API key.",
    ),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="Name of the model in requests; may be given several times, and answers have the first.",
        show_default="ORG/NAME, or the directory's name",
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File with one API key per line; requests must send one of them.",
        show_default="EAAS_API_KEY, or none",
    ),
]
KeyToShow = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File whose first API key is sent.",
        show_default="EAAS_API_KEY, or none",
        envvar="EAAS_ATTENTION_CLIENT__API_KEY_FILE",
        # The name is longer than the column in a terminal of 80 columns.
        show_envvar=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

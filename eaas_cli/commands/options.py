"""Command-line options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas import transports
from eaas.checkpoint.source import local_directory
from eaas.config.environment import ENDPOINT_VARIABLE
from eaas.errors import ConfigError
from eaas_cli.local.running_clusters import chosen

if TYPE_CHECKING:
    from eaas.config import ClusterConfig

__all__ = [
    "DEFAULT_ENDPOINT",
    "MODEL_HELP",
    "ConfigFile",
    "DemoModel",
    "Endpoint",
    "Join",
    "Json",
    "KeyToShow",
    "Load",
    "Model",
    "OptionalModel",
    "Plot",
    "Tls",
    "Transport",
    "as_url",
    "check_join",
    "with_settings",
]

DEFAULT_ENDPOINT = "http://127.0.0.1:8000"
"""Default endpoint of `eaas up`."""

MODEL_HELP = (
    "Directory of a Hugging Face MoE checkpoint, or its name in the cache of huggingface_hub."
)
_MODEL = typer.Option(
    "--model",
    help=MODEL_HELP,
    parser=local_directory,
    metavar="DIR|ORG/NAME",
    show_default=False,
)
Model = Annotated[Path, _MODEL]
OptionalModel = Annotated[Path | None, _MODEL]
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
_TRANSPORTS = f"Transport to each server: auto, {', '.join(transports.BUILT_IN)}."
Transport = Annotated[str, typer.Option(help=_TRANSPORTS)]
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
KeyToShow = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File whose first API key is sent.",
        show_default="EAAS_API_KEY, or none",
        envvar="EAAS_FRONTEND__API_KEY_FILE",
        # The name is longer than the column in a terminal of 80 columns.
        show_envvar=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw a plot, too.", show_default=False),
]


class Load:
    """Reads the settings, with a command's options on top.

    Attributes:
        file: `cluster.yaml`; None: defaults and the environment only.
    """

    def __init__(self, file: Path | None, overrides: dict[str, dict[str, Any]]) -> None:
        self.file = file
        self._overrides = overrides

    def __call__(self) -> ClusterConfig:
        """Read them. Raises ConfigError."""
        from eaas.config import load_config

        return load_config(self.file, **self._overrides)


# Type and help of the options that set a setting, by its name, and what else `typer.Option` gets.
_SETTINGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "insecure": (
        bool,
        "Let other machines connect without TLS and use the endpoint without an API key.",
        {},
    ),
    "host": (str, "Address to listen on.", {}),
    "port": (int, "Port to listen on; 0: a free one.", {}),
    "engine_host": (str, "Address of the engine, for frontends.", {"show_default": "127.0.0.1"}),
    "engine_port": (int, "Port of the engine; 0: a free one.", {"show_default": "0"}),
    "metrics_port": (int, "Port of /metrics; 0: none.", {"show_default": "0"}),
    "threads": (int, "Intra-op threads; 0: by the number of cores.", {}),
    "core": (int, "Core that the serving loop is bound to.", {"show_default": "any"}),
    "device": (
        str,
        "Device that holds the experts and computes: cpu, cuda or cuda:N.",
        {"show_default": "cpu"},
    ),
    "kernel": (str, "Expert kernel: auto, native, reference or triton.", {}),
    "quantization": (str, "Weights in memory: none, int8 or int4.", {}),
    "slots": (int, "Slots of the arena, for all clients together.", {}),
    "slot_tokens": (int, "Tokens that one slot holds.", {}),
    "transport": (str, _TRANSPORTS, {}),
    "operator_page": (bool, "Show buttons on the dashboard that kill and start servers.", {}),
    "api_key_file": (
        str,
        "File with one API key per line; requests must send one of them.",
        {"metavar": "FILE", "show_default": "EAAS_API_KEY, or none"},
    ),
    "served_model_name": (
        list[str],
        "Name of the model in requests; may be given several times, and answers have the first.",
        {"metavar": "NAME", "show_default": "ORG/NAME, or the directory's name"},
    ),
    "stop_members_on_exit": (bool, "Stop every member when the monitor ends.", {}),
    "store": (
        str,
        "embedded: a file in --data-dir; zookeeper: several monitors, one of them the leader.",
        {},
    ),
    "data_dir": (str, "Directory for state that survives a restart.", {"metavar": "DIR"}),
    "zookeeper_hosts": (
        str,
        "Addresses of the ZooKeeper servers.",
        {"metavar": "HOST:PORT,..."},
    ),
    "expected_servers": (
        int,
        "Expert servers to wait for before the first placement.",
        {"option": "--servers"},
    ),
    "redundancy": (int, "Servers that hold each expert.", {}),
}


def with_settings(
    texts: dict[str, tuple[str, str]] | None = None, **sections: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options that set settings, then --tls, --insecure and --config.

    The command has an argument `load` (`Load`) in their place.

    Args:
        texts: Help and shown default of some settings in this command, by name.
        sections: Names of settings by section, separated by blanks.
    """
    places = {name: section for section, names in sections.items() for name in names.split()}
    annotations: dict[str, Any] = {name: _option(name, texts or {}) for name in places}
    annotations |= {"tls": Tls, "insecure": _option("insecure", {}), "config": ConfigFile}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            tls, insecure, file = (given.pop(name) for name in ("tls", "insecure", "config"))
            # None leaves the file's value.
            overrides = {"security": {"tls_dir": tls and str(tls), "insecure": insecure or None}}
            for name, section in places.items():
                overrides.setdefault(section, {})[name] = given.pop(name)
            command(**given, load=Load(file, overrides))

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "load"]
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(n, kind, default=None if n != "insecure" else False, annotation=a)
            for n, a in annotations.items()
        ]
        functools.update_wrapper(run, command)
        parameters = [p.replace(kind=kind) for p in own] + added
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _option(name: str, texts: dict[str, tuple[str, str]]) -> Any:
    """Build the option that sets a setting."""
    kind, text, more = _SETTINGS[name]
    more = dict(more)
    option = more.pop("option", f"--{name.replace('_', '-')}")
    if name in texts:
        text, more["show_default"] = texts[name]
    accepted = kind if name == "insecure" else kind | None
    return Annotated[accepted, typer.Option(option, help=text, **more)]

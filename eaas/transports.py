"""The transports that carry slots between clients and expert servers: a line here, and a file on each side.

Other packages add theirs by entry points (docs/transports.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["AUTO", "BUILT_IN", "GROUP", "Transport", "known", "load", "names", "usable"]

_log = get_logger(__name__)

AUTO = "auto"
"""A client's choice of `shm` where it can map the server's memory, else `grpc`, for each connection."""

GROUP = "eaas.transports"
"""Entry points of this group are transports of other packages: a name and a `Transport`."""


@dataclass(frozen=True)
class Transport:
    """Both ends of a transport, each as `module:name`, so that a process imports only its own.

    Attributes:
        client: The client's end, an `attention_client.connections.transports.Opener`.
        server: The server's end, a subclass of `expert_server.transports.endpoint.Endpoint`.
        missing: A function that returns why this process cannot use it, and the remedy; an empty string if it
            can. Empty: it always can.
    """

    client: str
    server: str
    missing: str = ""

    def why_not(self) -> str:
        """Return why this process cannot use the transport; empty if it can."""
        reason = load(self.missing)() if self.missing else ""
        assert isinstance(reason, str)
        return reason


_OURS = {
    "shm": Transport(
        "attention_client.connections.transports.shared:open_shared",
        "expert_server.transports.shared_endpoint:SharedEndpoint",
    ),
    "grpc": Transport(
        "attention_client.connections.transports.grpc_transport:GrpcLink",
        "expert_server.transports.grpc_endpoint:GrpcEndpoint",
    ),
    "nixl": Transport(
        "attention_client.connections.transports.one_sided:open_nixl",
        "expert_server.transports.nixl_endpoint:NixlEndpoint",
        "eaas.one_sided:why_not",
    ),
}


BUILT_IN = tuple(_OURS)
"""Names of ours."""


def names() -> tuple[str, ...]:
    """Return the names of all transports, `auto` apart: ours, then those of other packages."""
    others = sorted(found.name for found in entry_points(group=GROUP) if found.name not in _OURS)
    return (*_OURS, *others)


def known(name: str) -> Transport:
    """Find a transport by its name.

    Raises:
        ConfigError: The name is unknown (the message lists those known), or its package cannot be used.
    """
    if name in _OURS:
        return _OURS[name]
    found = next((each for each in entry_points(group=GROUP) if each.name == name), None)
    if found is None:
        raise ConfigError(f"transport {name!r} is none of {', '.join((AUTO, *names()))}")
    try:
        transport = found.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport {name!r} ({found.value}): {error}") from error
    if not isinstance(transport, Transport):
        raise ConfigError(f"transport {name!r} ({found.value}) is no eaas.transports.Transport")
    return transport


def usable() -> dict[str, Transport]:
    """Return the transports that this process can use, by name; `auto` apart.

    One whose package cannot be used is left out, with a warning.
    """
    found = {}
    for name in names():
        try:
            transport = known(name)
            if not transport.why_not():
                found[name] = transport
        except ConfigError as error:
            _log.warning("not offered: %s", error)
    return found


def load(place: str) -> Any:
    """Import `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

"""Ways to reach a server's slots: same interface, same connection code on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc

from attention_client.connection import Link
from attention_client.transports.cable import open_grpc
from attention_client.transports.one_sided import open_nixl
from attention_client.transports.shared import open_shm
from eaas.errors import ConfigError
from eaas.one_sided import why_not
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["Opener", "opener"]


class Opener(Protocol):
    """Opens the data path to a server that granted a connection.

    `on_lost(reason)` is called from any thread, at most a few times, when the server is seen to be gone.

    Raises:
        ConnectionLostError: The server went away meanwhile.
        SharedMemoryError: The arena cannot be attached.
    """

    def __call__(
        self,
        granted: pb.ConnectResponse,
        channel: grpc.Channel,
        on_lost: Callable[[str], None],
    ) -> Link:
        """Open the link."""


_OPENERS: dict[str, Opener] = {"shm": open_shm, "grpc": open_grpc, "nixl": open_nixl}


def opener(transport: str) -> Opener:
    """The opener of a transport.

    Raises:
        ConfigError: There is none of that name (the message has those that there are), or what it needs is
            not installed.
    """
    if transport == "nixl" and (missing := why_not()):
        raise ConfigError(f"transport nixl: {missing}")
    try:
        return _OPENERS[transport]
    except KeyError:
        raise ConfigError(
            f"transport {transport!r} is unknown; choose one of {', '.join(_OPENERS)}"
        ) from None

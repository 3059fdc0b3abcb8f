"""Negotiation of protocol versions, so that processes can be upgraded one at a time.

    newer: speaks 1 and 2                             older: speaks 1
       a call, in version 2 ----------------------------->
            <------- FAILED_PRECONDITION, eaas-versions: 1-1
       the same call, in version 1 ---------------------->

A process answers in the version of the call. Each release supports its own version and the one before, so
that neighbouring releases can serve together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import grpc

from eaas.wire.header import VERSION

__all__ = ["CONTROL_PLANE", "SLOTS", "Refusal", "Versions", "negotiate", "refusal"]

_KEY = "eaas-versions"
_T = TypeVar("_T")


class Versions(NamedTuple):
    """Inclusive range of major versions of a contract (RPC or slots) that a process supports."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"


CONTROL_PLANE = Versions(1, 1)
"""Supported versions of registration, heartbeats and watches. Within a version messages only gain fields."""
SLOTS = Versions(VERSION, VERSION)
"""Supported versions of the slots' bytes."""


class Refusal(NamedTuple):
    """Refusal of a call in an unsupported version: ends the call with FAILED_PRECONDITION.

    Attributes:
        details: Message.
        trailing: Metadata with the supported versions.
    """

    details: str
    trailing: tuple[tuple[str, str], ...]


def refusal(spoken: Versions, asked: int, what: str, who: str, here: str) -> Refusal | None:
    """In the called process, make the refusal of a call in an unsupported version; None otherwise.

    Args:
        spoken: Versions that this process supports.
        asked: Version of the call.
        what: Name of the contract, for the message.
        who: Name of the caller, for the message.
        here: Name of this process, for the message.
    """
    if spoken.oldest <= asked <= spoken.newest:
        return None
    older = who if asked < spoken.oldest else here
    return Refusal(
        f"{who} asks in version {asked} of {what}, {here} speaks {spoken}: upgrade {older}",
        ((_KEY, f"{spoken.oldest}-{spoken.newest}"),),
    )


def negotiate(spoken: Versions, call: Callable[[int], _T]) -> _T:
    """In the caller, make a call (register, connect) in the newest version that both sides support.

    Args:
        spoken: Versions that this process supports.
        call: Makes the call in a version.

    Raises:
        grpc.RpcError: The call failed; FAILED_PRECONDITION if there is no common version.
    """
    try:
        return call(spoken.newest)
    except grpc.RpcError as error:
        theirs = _versions_in(error)
        if theirs is None or not max(spoken.oldest, theirs.oldest) <= theirs.newest < spoken.newest:
            raise
        common = theirs.newest
    return call(common)


def _versions_in(error: grpc.RpcError) -> Versions | None:
    """Read the versions that the other side supports from its refusal; None for other errors."""
    if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return None
    text = next((str(value) for key, value in error.trailing_metadata() or () if key == _KEY), "")
    oldest, _, newest = text.partition("-")
    return Versions(int(oldest), int(newest)) if oldest.isdecimal() and newest.isdecimal() else None

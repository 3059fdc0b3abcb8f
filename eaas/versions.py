"""Which versions of a contract two processes have in common, so that they can be upgraded one at a time.

    newer: speaks 1 and 2                             older: speaks 1
       a call, in version 2 ----------------------------->
            <------- FAILED_PRECONDITION, eaas-versions: 1-1
       the same call, in version 1 ---------------------->  and so it is

Whoever is asked in a version that it speaks answers in that. A process of the next release speaks its own
version and the one before, so that any two neighbours can serve together.
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
    """The major versions of one contract that a process speaks, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        """For people."""
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"


CONTROL_PLANE = Versions(1, 1)
"""Of registration, heartbeats and watches. Within a version messages only gain fields."""
SLOTS = Versions(VERSION, VERSION)
"""Of the slots' bytes."""


class Refusal(NamedTuple):
    """Ends a call with FAILED_PRECONDITION.

    Attributes:
        details: For people.
        trailing: Metadata, from which the caller learns what is spoken here.
    """

    details: str
    trailing: tuple[tuple[str, str], ...]


def refusal(spoken: Versions, asked: int, what: str, who: str, here: str) -> Refusal | None:
    """How a call is refused, where it is not in a version that this process speaks.

    Args:
        spoken: By this process.
        asked: Version of the call.
        what: Names the contract, for people.
        who: Names the caller, for people.
        here: Names this process, for people.
    """
    if spoken.oldest <= asked <= spoken.newest:
        return None
    older = who if asked < spoken.oldest else here
    return Refusal(
        f"{who} asks in version {asked} of {what}, {here} speaks {spoken}: upgrade {older}",
        ((_KEY, f"{spoken.oldest}-{spoken.newest}"),),
    )


def negotiate(spoken: Versions, call: Callable[[int], _T]) -> _T:
    """Calls in the newest version that both sides speak.

    Args:
        spoken: By this process.
        call: Makes the call in a version.

    Raises:
        grpc.RpcError: The call failed; FAILED_PRECONDITION where there is no such version.
    """
    try:
        return call(spoken.newest)
    except grpc.RpcError as error:
        told = _told(error)
        if told is None or not max(spoken.oldest, told.oldest) <= told.newest < spoken.newest:
            raise
        common = told.newest
    return call(common)


def _told(error: grpc.RpcError) -> Versions | None:
    """What the other side speaks, where it refused the version."""
    if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return None
    said = next((str(value) for key, value in error.trailing_metadata() or () if key == _KEY), "")
    oldest, _, newest = said.partition("-")
    return Versions(int(oldest), int(newest)) if oldest.isdecimal() and newest.isdecimal() else None

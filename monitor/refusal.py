"""How a call of the contract is refused.

What is not refused on purpose is a mistake of the monitor's own: it ends the call with UNKNOWN, and is logged
with its trace.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from eaas.grpc_requests import refusal
from eaas.rpc.v1 import common_pb2, monitor_pb2
from eaas.types import Role, ServerReach
from monitor.registry import IdTakenError, UnknownLifeError

__all__ = [
    "LONGEST_TEXT",
    "Refused",
    "judged",
    "reach_of",
    "refusals",
    "require_role",
    "require_small",
    "require_sound",
]

LONGEST_TEXT = 255
"""Characters of a reason."""

# As stores and watchers can take it: ZooKeeper drops whoever writes a megabyte.
_MOST_MEMBER_BYTES = 64 << 10
_MOST_REACH_BYTES = 512 << 10


class Refused(Exception):
    """The call ends with this status (`monitor.proto` says what each of them means).

    Args:
        code: Of the status.
        details: For people.
        trailing: Metadata of the refusal.
    """

    def __init__(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(details)
        self.code = code
        self.trailing = trailing


def require_small(member: common_pb2.Member) -> None:
    """Refuses a member that no store could keep, or that would crowd out the others of a snapshot."""
    size = member.ByteSize()
    if size > _MOST_MEMBER_BYTES:
        why = f"a member has {_MOST_MEMBER_BYTES} bytes at most, this one {size}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, why)


def reach_of(request: monitor_pb2.HeartbeatRequest) -> tuple[ServerReach, ...] | None:
    """What a heartbeat says of servers; None where it says nothing. Refuses one that is too large."""
    if not request.HasField("reach"):
        return None
    size = request.reach.ByteSize()
    if size > _MOST_REACH_BYTES:
        why = f"a reach has {_MOST_REACH_BYTES} bytes at most, this one {size}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, why)
    return ServerReach.from_proto(request.reach)


def require_sound(request: Any) -> None:
    """Refuses what is no message, or has values out of their ranges."""
    if (refused := refusal(request)) is not None:
        raise Refused(*refused)


def require_role(certified: str | None, *roles: Role) -> None:
    """Refuses whoever has a certificate (`eaas.authority.role_of`) of none of these roles."""
    if certified is not None and certified not in {role.value for role in roles}:
        wanted = " or ".join(role.value for role in roles)
        who = certified or "whoever has no role in its certificate"
        raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"this is for {wanted}, not for {who}")


@contextmanager
def judged() -> Iterator[None]:
    """Within it, a ValueError is about what the caller said."""
    try:
        yield
    except ValueError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


@asynccontextmanager
async def refusals(context: Any) -> AsyncIterator[None]:
    """Within it, what the registry or the service refuses ends the call."""
    trailing: tuple[tuple[str, str], ...] = ()
    try:
        yield
        return
    except IdTakenError as error:
        code, details = grpc.StatusCode.ALREADY_EXISTS, str(error)
    except UnknownLifeError as error:
        code, details = grpc.StatusCode.NOT_FOUND, str(error)
    except Refused as error:
        code, details, trailing = error.code, str(error), error.trailing
    context.set_trailing_metadata(trailing)
    await context.abort(code, details)

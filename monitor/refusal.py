"""Refusals of calls to the monitor, and their gRPC statuses.

Any other exception is a bug of the monitor: it ends the call with UNKNOWN, and its traceback is logged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from eaas.net.request_validation import refusal
from eaas.rpc.v1 import common_pb2, monitor_pb2
from eaas.types import Role, ServerReach
from monitor.registry import IdTakenError, UnknownIncarnationError

__all__ = [
    "LONGEST_TEXT",
    "Refused",
    "bad_arguments",
    "reach_of",
    "refusals",
    "require_role",
    "require_small",
    "require_valid",
]

LONGEST_TEXT = 255
"""Limit of the text of a reason, in characters."""

# Limits that protect stores and watchers, because ZooKeeper drops a client that writes a megabyte.
_MOST_MEMBER_BYTES = 64 << 10
_MOST_REACH_BYTES = 512 << 10


class Refused(Exception):
    """The monitor refuses a call with this status (`monitor.proto` lists the meanings).

    Args:
        code: Status code.
        details: Status text.
        trailing: Trailing metadata.
    """

    def __init__(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(details)
        self.code = code
        self.trailing = trailing


def require_small(member: common_pb2.Member) -> None:
    """Refuse a registration whose member is too large for the store and for snapshots."""
    _require_size("member", member, _MOST_MEMBER_BYTES)


def reach_of(request: monitor_pb2.HeartbeatRequest) -> tuple[ServerReach, ...] | None:
    """Return the reach (connections to servers) in a client's heartbeat, or None. Refuses one too large."""
    if not request.HasField("reach"):
        return None
    _require_size("reach", request.reach, _MOST_REACH_BYTES)
    return ServerReach.from_proto(request.reach)


def _require_size(what: str, message: Any, most_bytes: int) -> None:
    if (size := message.ByteSize()) > most_bytes:
        why = f"a {what} has {most_bytes} bytes at most, this one {size}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, why)


def require_valid(request: Any) -> None:
    """Refuse a message (of any call, or one heartbeat) that is malformed or has values out of range."""
    if (refused := refusal(request)) is not None:
        raise Refused(*refused)


def require_role(certified: str | None, *roles: Role) -> None:
    """Refuse a caller whose certificate has none of these roles (see `eaas.net.authorisation.role_of`)."""
    if certified is not None and certified not in {role.value for role in roles}:
        wanted = " or ".join(role.value for role in roles)
        who = certified or "a certificate without a role"
        raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"this is for {wanted}, not for {who}")


@contextmanager
def bad_arguments() -> Iterator[None]:
    """Context manager that turns a ValueError raised inside into a refusal with INVALID_ARGUMENT."""
    try:
        yield
    except ValueError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


@asynccontextmanager
async def refusals(context: Any) -> AsyncIterator[None]:
    """Context manager that ends the call with the status of a refusal raised inside."""
    trailing: tuple[tuple[str, str], ...] = ()
    try:
        yield
        return
    except IdTakenError as error:
        code, details = grpc.StatusCode.ALREADY_EXISTS, str(error)
    except UnknownIncarnationError as error:
        code, details = grpc.StatusCode.NOT_FOUND, str(error)
    except Refused as error:
        code, details, trailing = error.code, str(error), error.trailing
    context.set_trailing_metadata(trailing)
    await context.abort(code, details)

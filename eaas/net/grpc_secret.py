"""The secret of a loopback cluster, sent with every gRPC call: `authorization: Bearer SECRET`.

`eaas.net.server_records` explains its origin and why other users cannot learn it.
"""

from __future__ import annotations

import hmac
import os
import pwd
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from eaas import user_files
from eaas.net import server_records
from eaas.net.grpc_failure import CallFailure

__all__ = ["AioSecretGuard", "SecretGuard", "proof"]

_KEY = "authorization"
_SCHEME = "Bearer "
# Methods without the check, for health probes. Health's streams need the secret, because each holds a thread.
_OPEN = frozenset({"/grpc.health.v1.Health/Check"})


def proof(address: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that presents the secret in a call; empty if the server has no record for this user.

    Args:
        address: host:port of the server; None for calls with TLS.

    Raises:
        CallFailure: UNAVAILABLE; the recorded process has ended. The process that listens at the address now
            must not learn the secret.
    """
    record = server_records.find(address) if address else None
    if record is None:
        return ()
    if not record.lives:
        raise CallFailure(
            grpc.StatusCode.UNAVAILABLE, f"the server at {address} (pid {record.pid}) has ended"
        )
    return ((_KEY, f"{_SCHEME}{record.secret}"),)


class _Check:
    """Checks whether calls present the secret, and refuses those that do not."""

    def __init__(self, secret: str) -> None:
        self._wanted = f"{_SCHEME}{secret}".encode()
        self._details = (
            f"this cluster is for user {_user()} (uid {os.geteuid()}) alone: calls must show its secret, "
            f"which that user's processes read from {user_files.place()}; "
            "call as that user, or start the cluster with --tls DIR"
        )

    def passes(self, details: Any) -> bool:
        if details.method in _OPEN:
            return True
        shown = [value for key, value in details.invocation_metadata if key == _KEY]
        return len(shown) == 1 and hmac.compare_digest(_bytes(shown[0]), self._wanted)

    def refuse(self, _requests: Any, context: Any) -> Any:
        return context.abort(grpc.StatusCode.UNAUTHENTICATED, self._details)

    async def refuse_later(self, _requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._details)


class SecretGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Server interceptor that refuses calls without the cluster's secret, with UNAUTHENTICATED."""

    def __init__(self, secret: str) -> None:
        self._check = _Check(secret)
        # A stream handler serves every method, because it can refuse a call without waiting for a request.
        self._refusal = grpc.stream_unary_rpc_method_handler(self._check.refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the method's handler if the call presents the secret, else one that refuses the call."""
        return continuation(details) if self._check.passes(details) else self._refusal


class AioSecretGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Server interceptor like `SecretGuard`, for servers of grpc.aio."""

    def __init__(self, secret: str) -> None:
        self._check = _Check(secret)
        self._refusal = grpc.stream_unary_rpc_method_handler(self._check.refuse_later)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the method's handler if the call presents the secret, else one that refuses the call."""
        return await continuation(details) if self._check.passes(details) else self._refusal


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "without a name"

"""Failures of calls, as gRPC's blocking calls raise them."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["CallFailure"]


class CallFailure(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed call without a `grpc.Call` object of gRPC.

    Args:
        code: Status.
        details: Message.
        trailing: Trailing metadata.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, tuple(trailing)

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> CallFailure:
        """Convert a failure of grpc.aio."""
        return cls(error.code(), error.details() or "", error.trailing_metadata() or ())

    @classmethod
    def cancelled(cls) -> CallFailure:
        """A call that this process cancelled."""
        return cls(grpc.StatusCode.CANCELLED, "cancelled by this process")

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """The message."""
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        """Always empty."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """The trailing metadata."""
        return self._trailing

"""Exception for failed calls in the calling process, with the interface of gRPC's own."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["CallFailure"]


class CallFailure(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed gRPC call, raised where gRPC itself provides no `grpc.Call` object.

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
        """Convert a failure of grpc.aio to a `CallFailure`."""
        return cls(error.code(), error.details() or "", error.trailing_metadata() or ())

    @classmethod
    def cancelled(cls) -> CallFailure:
        """Make the failure of a call that this process cancelled."""
        return cls(grpc.StatusCode.CANCELLED, "cancelled by this process")

    def code(self) -> grpc.StatusCode:
        """The status code of the failed call."""
        return self._code

    def details(self) -> str:
        """The status message of the failed call."""
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        """Initial metadata of the failed call; always empty."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Trailing metadata of the failed call."""
        return self._trailing

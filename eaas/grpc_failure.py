"""How a call failed, in the form of gRPC's blocking calls."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["CallFailure"]


class CallFailure(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed call that has no `grpc.Call` of gRPC's own.

    Args:
        code: Its status.
        details: For people.
        trailing: Metadata that came with the status.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, tuple(trailing)

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> CallFailure:
        """The same failure, as grpc.aio tells it."""
        return cls(error.code(), error.details() or "", error.trailing_metadata() or ())

    @classmethod
    def cancelled(cls) -> CallFailure:
        """This process gave the call up."""
        return cls(grpc.StatusCode.CANCELLED, "cancelled by this process")

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """For people."""
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        """None came."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Metadata that came with the status."""
        return self._trailing

"""Validation of requests in all gRPC servers, before the handler.

Bytes that are not a message and messages with values out of range (`eaas.net.message_ranges`) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from eaas.net.authorisation import served_by
from eaas.net.message_validation import check
from eaas.wire.frame import EXCHANGE

__all__ = ["RequestGuard", "reader", "refusal"]


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a request deserializer so that it returns the error of an invalid message instead of raising it.

    The guard then ends the call with that error. If a deserializer raises, gRPC answers without the cause and
    logs a traceback.

    Args:
        parse: Deserializer; raises DecodeError.
    """

    def read(data: bytes) -> Any:
        try:
            message = parse(data)
            check(message)
        except (DecodeError, ValueError) as error:
            return error
        return message

    return read


def refusal(request: Any) -> tuple[grpc.StatusCode, str] | None:
    """Return the status and text that refuse a request read by `reader`; None for a valid request."""
    if isinstance(request, DecodeError):
        return grpc.StatusCode.INTERNAL, f"the request is not a valid protobuf message: {request}"
    if isinstance(request, ValueError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(request)
    return None


class RequestGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Server interceptor that refuses invalid requests and stream messages, before the handler."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap a method's handler with the validation of its requests (gRPC's interceptor interface)."""
        handler = continuation(details)
        # A handler without a deserializer takes bytes. `Exchange` validates its frames while copying them.
        if handler is None or handler.request_deserializer is None or details.method == EXCHANGE:
            return handler
        kind, serve = served_by(handler)

        def one(request: Any, context: Any) -> Any:
            _refuse(request, context)
            return serve(request, context)

        def stream(requests: Iterator[Any], context: Any) -> Any:
            return serve(_checked(requests, context), context)

        return getattr(grpc, f"{kind}_rpc_method_handler")(
            stream if handler.request_streaming else one,
            reader(handler.request_deserializer),
            handler.response_serializer,
        )


def _refuse(request: Any, context: Any) -> None:
    if (refused := refusal(request)) is not None:
        context.abort(*refused)


def _checked(requests: Iterator[Any], context: Any) -> Iterator[Any]:
    for request in requests:
        _refuse(request, context)
        yield request

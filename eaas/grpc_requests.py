"""What every gRPC server of the cluster refuses before a handler sees it: bytes that are no message, and
messages with values out of their ranges (`eaas.message_ranges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from eaas.message_check import check
from eaas.wire.frame import EXCHANGE

__all__ = ["RequestGuard", "reader", "refusal"]


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer that gives a message, or the error of bytes that are none or that are out of range.

    The call raises the error: gRPC answers what a deserializer raises with a status that does not name the
    cause, and logs a traceback for each.

    Args:
        parse: Reads a message; raises DecodeError.
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
    """How a call with this request (of `reader`) ends; None: it goes on."""
    if isinstance(request, DecodeError):
        return grpc.StatusCode.INTERNAL, f"this is no message of the contract: {request}"
    if isinstance(request, ValueError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(request)
    return None


class RequestGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses bad requests of a server of threads; also each bad message of a stream."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See gRPC."""
        handler = continuation(details)
        # A handler without a deserializer takes bytes. Frames of the data path are bytes as well: `Exchange`
        # checks them as it copies them.
        if handler is None or handler.request_deserializer is None or details.method == EXCHANGE:
            return handler
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        serve = getattr(handler, kind)

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

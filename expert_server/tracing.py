"""Spans of the batches that an expert server computes (OpenTelemetry), where a request of one is traced.

The context of the client's span comes in the request's header (`eaas.wire.slot`). The batch is a child of the
first traced request's, and linked to the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import SpanKind

from eaas.telemetry.tracing import Tracing, unpack
from eaas.wire import Arena
from eaas.wire.slot import read_trace
from expert_server.replies import Request

__all__ = ["BatchTraces"]


class BatchTraces:
    """Of one server's loop.

    Args:
        tracing: Makes the spans.
        arena: Where the requests stand.
        server_id: Told with each span.
    """

    def __init__(self, tracing: Tracing, arena: Arena, server_id: str) -> None:
        self._spans = tracing.children
        self._arena = arena
        self._server_id = server_id

    @contextmanager
    def batch(self, group: Sequence[Request], now: float) -> Iterator[None]:
        """A batch is computed within; `now` is the loop's clock."""
        arena = self._arena
        contexts = [
            context
            for request in group
            if (data := read_trace(arena.buffer, arena.request_offset(request.slot)))
            and (context := unpack(data)) is not None
        ]
        if not contexts:
            yield
            return
        span = self._spans.start(
            "server batch",
            contexts[0],
            {
                "eaas.server": self._server_id,
                "eaas.layer": group[0].header.layer,
                "eaas.requests": len(group),
                "eaas.tokens": sum(request.header.batch_size for request in group),
                "eaas.waited_s": now - min(request.admitted_at for request in group),
            },
            SpanKind.SERVER,
            contexts[1:],
        )
        try:
            yield
        finally:
            span.end()

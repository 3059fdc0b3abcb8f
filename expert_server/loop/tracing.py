"""Spans of the batches that an expert server computes (OpenTelemetry), if one of their requests is traced.

The request's header carries the context of the client's span (`eaas.wire.slot`). The batch is a child of the
first traced request's span, and linked to the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import SpanKind

from eaas.telemetry.tracing import Tracing, unpack
from eaas.wire.slot import read_trace
from expert_server.loop.slots import Request

__all__ = ["BatchTraces"]


class BatchTraces:
    """Records a span for each batch of a server's loop that has a traced request, for the trace collector.

    Args:
        tracing: Creates and exports the spans.
        server_id: Attribute of each span.
    """

    def __init__(self, tracing: Tracing, server_id: str) -> None:
        self._spans = tracing.children
        self._server_id = server_id

    @contextmanager
    def batch(self, group: Sequence[Request], now: float) -> Iterator[None]:
        """Record a span for the batch computed in the block, if a request is traced; `now`: loop time."""
        contexts = [
            context
            for request in group
            if (data := read_trace(request.header_bytes, 0))
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

"""OpenTelemetry spans, made in a client, of sampled requests, their layer calls and dispatches.

    request                       a generation, from its arrival to its last token; sampled here
      layer                       one call of one MoE layer for the request's batch
        dispatch                  one request to one expert server
          server batch            made by that server (`expert_server.loop.tracing`)

A forward pass runs a batch of requests. Its layer spans are children of the first sampled request and linked
to the others, so each span exists once. A batch without a sampled request has no spans and no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, StatusCode

from eaas.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from eaas.telemetry.spans import ChildSpan

__all__ = ["RequestTraces"]


class RequestTraces:
    """Traces of one attention client. The event loop traces requests; the engine's thread traces layers.

    Args:
        tracing: Samples requests and makes spans.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._spans = tracing.children
        self._requests: dict[str, Span] = {}
        self._in_batch: Callable[[], Iterable[str]] = tuple

    def watch(self, in_batch: Callable[[], Iterable[str]]) -> None:
        """Set how to get the ids of the requests in the running forward pass: parents of layer spans."""
        self._in_batch = in_batch

    def begin(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Start the span of a generation request when it arrives; keeps it only if it is sampled."""
        span = self._tracer.start_span(
            "request",
            kind=SpanKind.SERVER,
            attributes={
                "eaas.request_id": request_id,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.usage.input_tokens": prompt_tokens,
            },
        )
        if span.is_recording():
            self._requests[request_id] = span

    def first_token(self, request_id: str) -> None:
        """Add the event of a request's first token to its span."""
        if (span := self._requests.get(request_id)) is not None:
            span.add_event("first token")

    def end(self, request_id: str, reason: str, tokens: int) -> None:
        """End the span of a generation request, with its finish reason and number of tokens."""
        if (span := self._requests.pop(request_id, None)) is None:
            return
        span.set_attribute("gen_ai.usage.output_tokens", tokens)
        span.set_attribute("gen_ai.response.finish_reasons", (reason,))
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end()

    def layer(self, layer: int, tokens: int) -> ChildSpan | None:
        """Start the span of a layer call. Returns None if its batch has no sampled request."""
        if not self._requests:
            return None
        spans = [s for i in self._in_batch() if (s := self._requests.get(i)) is not None]
        if not spans:
            return None
        return self._spans.start(
            "layer",
            spans[0].get_span_context(),
            {"eaas.layer": layer, "eaas.tokens": tokens},
            links=[other.get_span_context() for other in spans[1:]],
        )

    def dispatch(self, layer: ChildSpan, server: str, tokens: int) -> ChildSpan:
        """Start the span of one request to a server, in its layer's span; the server adds its own below."""
        return self._spans.start(
            "dispatch",
            layer.context,
            {"eaas.server": server, "eaas.tokens": tokens},
            SpanKind.CLIENT,
        )

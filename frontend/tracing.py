"""OpenTelemetry spans of requests, which the frontend samples; layer spans are below them in the engine."""

from __future__ import annotations

from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode

from eaas.telemetry.tracing import Tracing, pack

__all__ = ["RequestTraces"]


class RequestTraces:
    """Traces of one frontend's requests, made on the event loop.

    Args:
        tracing: Samples requests and makes spans; None: no spans.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracer = NoOpTracer() if tracing is None else tracing.tracer
        self._requests: dict[str, Span] = {}

    def begin(self, request_id: str, prompt_tokens: int, max_tokens: int) -> bytes:
        """Start the span of a generation request when it arrives.

        Returns:
            Its context (`eaas.telemetry.tracing.pack`); empty if it is not sampled.
        """
        span = self._tracer.start_span(
            "request",
            kind=SpanKind.SERVER,
            attributes={
                "eaas.request_id": request_id,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.usage.input_tokens": prompt_tokens,
            },
        )
        if not span.is_recording():
            return b""
        self._requests[request_id] = span
        return pack(span.get_span_context())

    def first_token(self, request_id: str) -> None:
        """Add the event of a request's first token to its span."""
        if (span := self._requests.get(request_id)) is not None:
            span.add_event("first token")

    def moved(self, request_id: str, reason: str, pause_s: float) -> None:
        """Add to the span of a request, which had begun, that it goes on with another engine."""
        if (span := self._requests.get(request_id)) is not None:
            span.add_event("moved", {"eaas.reason": reason, "eaas.pause_s": pause_s})

    def end(self, request_id: str, reason: str, tokens: int) -> None:
        """End the span of a generation request, with its finish reason and number of tokens."""
        if (span := self._requests.pop(request_id, None)) is None:
            return
        span.set_attribute("gen_ai.usage.output_tokens", tokens)
        span.set_attribute("gen_ai.response.finish_reasons", (reason,))
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end()

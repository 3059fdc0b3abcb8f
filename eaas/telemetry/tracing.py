"""A process' tracer, and a span's context as bytes that fit a slot.

A trace is sampled where its root begins, which is a request at an attention client. What comes after goes by
that: who has no context of a sampled request makes no span.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanContext, TraceFlags

from eaas.config_telemetry import TelemetryConfig
from eaas.errors import ConfigError
from eaas.log import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer

__all__ = ["CONTEXT_BYTES", "Tracing", "pack", "start_tracing", "unpack"]

_log = get_logger(__name__)
CONTEXT_BYTES = 24
_TRACE_ID_BYTES = 16
# The exporter's deadline for one call, and the patience for what is left when a process ends.
_EXPORT_S = 5
_LAST_S = 2.0


class Tracing:
    """Makes the spans of a process; close it.

    Args:
        provider: Samples requests.
        processor: Where spans go; the provider gets it here.

    Attributes:
        tracer: For requests, which it samples.
        children: For all below those that are sampled.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        # Needs the SDK, which need not be there where nothing is traced.
        from eaas.telemetry.spans import SCOPE, ChildSpans

        provider.add_span_processor(processor)
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(SCOPE)
        self.children = ChildSpans(provider, processor)

    def close(self) -> None:
        """Sends what is left, and ends; what a slow collector has not taken after 2 s is dropped."""
        # OpenTelemetry's own patience is 30 s here (SDK 1.45), and its flush heeds no time at all.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_S)
        if last.is_alive():
            _log.warning("the collector of traces is too slow: the last spans are dropped")


def start_tracing(config: TelemetryConfig, role: str, instance: str) -> Tracing | None:
    """The tracing of this process; None where it is switched off.

    Spans are sent by a thread of their own, in batches; where the collector does not answer, they are
    dropped, and the log says so.

    Args:
        config: Switch, share, collector.
        role: Of the process; OpenTelemetry's `service.name` is "eaas-" and this.
        instance: Its id in the cluster.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not config.traces:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        from eaas.telemetry.otlp import SpanExporter
    except ImportError as error:
        raise ConfigError(
            f"telemetry.traces: OpenTelemetry is missing ({error}): "
            "pip install 'expert-as-a-service[otel]'"
        ) from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sampling)),
        resource=Resource.create({"service.name": f"eaas-{role}", "service.instance.id": instance}),
        # Nobody but the role ends it: a process that is torn down at once is to say so.
        shutdown_on_exit=False,
    )
    exporter = SpanExporter(
        endpoint=config.endpoint,
        insecure=config.endpoint.startswith("http://"),
        timeout=_EXPORT_S,
    )
    return Tracing(provider, BatchSpanProcessor(exporter))


def pack(context: SpanContext) -> bytes:
    """Trace id and span id, big-endian as in W3C's traceparent."""
    return context.trace_id.to_bytes(_TRACE_ID_BYTES, "big") + context.span_id.to_bytes(8, "big")


def unpack(data: bytes) -> SpanContext | None:
    """The context of a sampled span elsewhere; None where the bytes are those of no span."""
    context = SpanContext(
        trace_id=int.from_bytes(data[:_TRACE_ID_BYTES], "big"),
        span_id=int.from_bytes(data[_TRACE_ID_BYTES:CONTEXT_BYTES], "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return context if context.is_valid else None

"""Tracer of an attention client or expert server, and the encoding of span contexts as bytes in a slot.

The sampling decision is made at the root of a trace, a request at an attention client. Without the context of
a sampled request there are no further spans.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanContext, TraceFlags

from eaas.config import TelemetryConfig
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.net.loopback import is_loopback

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Tracer

__all__ = ["CONTEXT_BYTES", "Tracing", "pack", "start_tracing", "unpack"]

_log = get_logger(__name__)
CONTEXT_BYTES = 24
_TRACE_ID_BYTES = 16
# Deadline of one export, and of the last export when a process ends.
_EXPORT_S = 5
_LAST_S = 2.0


class Tracing:
    """Creates the spans of a process and sends them to a collector; close it.

    Args:
        provider: Samples requests.
        processor: Receives spans; registered with the provider.

    Attributes:
        tracer: Creates and samples spans of requests.
        children: Creates spans below sampled ones.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        # Imported here, because the SDK is optional.
        from eaas.telemetry.spans import SCOPE, ChildSpans

        provider.add_span_processor(processor)
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(SCOPE)
        self.children = ChildSpans(provider, processor)

    def close(self) -> None:
        """Send the remaining spans to the collector for up to 2 s, then stop tracing."""
        # The SDK (1.45) waits 30 s here, and its flush ignores the timeout.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_S)
        if last.is_alive():
            _log.warning("the collector of traces is too slow: the last spans are dropped")


def start_tracing(config: TelemetryConfig, role: str, instance: str) -> Tracing | None:
    """Start tracing in this process; return None if it is disabled.

    A thread sends spans in batches. If the collector does not answer, spans are dropped, which is logged.

    Args:
        config: Settings.
        role: Role of the process; OpenTelemetry's `service.name` is "eaas-" plus role.
        instance: Id in the cluster.

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
        # `Tracing.close` shuts it down with a deadline.
        shutdown_on_exit=False,
    )
    # gRPC would send even calls of loopback through a proxy.
    options: Any = (("grpc.enable_http_proxy", int(not is_loopback(config.endpoint))),)
    exporter = SpanExporter(
        endpoint=config.endpoint,
        insecure=config.endpoint.startswith("http://"),
        timeout=_EXPORT_S,
        channel_options=options,
    )
    return Tracing(provider, BatchSpanProcessor(exporter))


def pack(context: SpanContext) -> bytes:
    """In the client, encode its span's ids for a request's slot, big-endian as in W3C's traceparent."""
    return context.trace_id.to_bytes(_TRACE_ID_BYTES, "big") + context.span_id.to_bytes(8, "big")


def unpack(data: bytes) -> SpanContext | None:
    """In the server, decode the context of the client's sampled span from a slot; None if there is none."""
    context = SpanContext(
        trace_id=int.from_bytes(data[:_TRACE_ID_BYTES], "big"),
        span_id=int.from_bytes(data[_TRACE_ID_BYTES:CONTEXT_BYTES], "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return context if context.is_valid else None

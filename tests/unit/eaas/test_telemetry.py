"""The end of tracing: the last spans are sent, and a hanging collector does not block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from eaas.telemetry import Tracing
from eaas.telemetry import tracing as tracing_module

PATIENCE_S = 20.0


class Collector(SpanExporter):
    """Takes spans once it is let."""

    def __init__(self) -> None:
        self.lets = threading.Event()
        self.taken: list[str] = []
        self.done = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.lets.wait(PATIENCE_S)
        self.taken += [span.name for span in spans]
        self.done.set()
        return SpanExportResult.SUCCESS


def tracing_to(collector: Collector) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    return Tracing(provider, BatchSpanProcessor(collector, schedule_delay_millis=1e9))


def test_the_last_spans_are_sent() -> None:
    collector = Collector()
    collector.lets.set()
    tracing = tracing_to(collector)
    tracing.tracer.start_span("last").end()
    tracing.close()
    assert collector.taken == ["last"]


def test_a_hanging_collector_does_not_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing_module, "_LAST_S", 0.1)
    collector = Collector()
    tracing = tracing_to(collector)
    tracing.tracer.start_span("last").end()
    with caplog.at_level(logging.WARNING):
        tracing.close()
    assert collector.taken == []
    assert "the last spans are dropped" in caplog.text
    collector.lets.set()
    assert collector.done.wait(PATIENCE_S)

"""Fast spans and their encoding equal those of the SDK."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from eaas.telemetry import Tracing
from eaas.telemetry import tracing as tracing_module
from eaas.telemetry.otlp import encode

ids = st.integers(1, 2**64 - 1)
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    ids,
    st.booleans(),
    st.just(TraceFlags(TraceFlags.SAMPLED)),
)
values = st.text() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
children = st.tuples(
    st.text(min_size=1),
    contexts,
    st.dictionaries(st.text(min_size=1), values, max_size=5),
    st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT]),
    st.lists(contexts, max_size=3),
    st.none() | st.text(),
)


def tracing() -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "test"}), shutdown_on_exit=False)
    return Tracing(provider, SimpleSpanProcessor(exporter)), exporter


def snapshot(span: ReadableSpan) -> dict[str, Any]:
    """The span without random ids and times."""
    return {
        "name": span.name,
        "parent": span.parent,
        "trace": span.context.trace_id,
        "flags": span.context.trace_flags,
        "remote": span.context.is_remote,
        "kind": span.kind,
        "attributes": dict(span.attributes or {}),
        "links": [link.context for link in span.links],
        "status": (span.status.status_code, span.status.description),
        "resource": span.resource,
        "scope": span.instrumentation_scope,
        "events": tuple(span.events),
    }


@given(children)
def test_a_child_equals_the_sdks_span(child: tuple[Any, ...]) -> None:
    name, parent, attributes, kind, links, failure = child
    made, exporter = tracing()
    before = time.time_ns()
    ours = made.children.start(name, parent, dict(attributes), kind, links)
    ours.attributes["late"] = 1
    theirs = made.tracer.start_span(
        name,
        set_span_in_context(NonRecordingSpan(parent)),
        kind,
        attributes,
        [Link(link) for link in links],
    )
    theirs.set_attribute("late", 1)
    if failure is not None:
        ours.fail(failure)
        theirs.set_status(StatusCode.ERROR, failure)
    ours.end()
    theirs.end()
    mine, other = exporter.get_finished_spans()
    assert snapshot(mine) == snapshot(other)
    assert mine.context.span_id not in (0, other.context.span_id, parent.span_id)
    assert before <= mine.start_time <= mine.end_time <= time.time_ns()


@given(st.lists(children | st.none(), max_size=6))
def test_the_message_equals_that_of_the_librarys_encoder(
    drawn: list[tuple[Any, ...] | None],
) -> None:
    made, exporter = tracing()
    for child in drawn:
        if child is None:
            with made.tracer.start_as_current_span("request", kind=SpanKind.SERVER) as request:
                request.add_event("first token", {"a": [1, 2]})
            continue
        name, parent, attributes, kind, links, failure = child
        ours = made.children.start(name, parent, attributes, kind, links)
        if failure is not None:
            ours.fail(failure)
        ours.end()
    spans = exporter.get_finished_spans()

    def in_order(message: Any) -> Any:
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                scope.spans.sort(key=lambda span: (span.span_id, span.start_time_unix_nano))
        return message

    assert in_order(encode(spans)) == in_order(encode_spans(spans))


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


@pytest.mark.parametrize("hangs", [False, True])
def test_the_last_spans_are_sent_if_the_collector_takes_them(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    if hangs:
        monkeypatch.setattr(tracing_module, "_LAST_S", 0.1)
    else:
        collector.lets.set()
    tracing = tracing_to(collector)
    tracing.tracer.start_span("last").end()
    with caplog.at_level(logging.WARNING):
        tracing.close()
    assert collector.taken == ([] if hangs else ["last"])
    assert ("the last spans are dropped" in caplog.text) == hangs
    collector.lets.set()
    assert collector.done.wait(PATIENCE_S)

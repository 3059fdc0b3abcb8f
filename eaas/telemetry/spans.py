"""Child spans of sampled spans, at a tenth of the SDK's cost.

A traced request has hundreds of spans, one for each layer, dispatch and server batch of each token. For each
span the SDK calls a sampler, checks attributes and takes locks. These steps are unnecessary if the parent is
sampled and attributes are plain numbers and strings. The result is the SDK's `ReadableSpan`, for any
processor.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

__all__ = ["SCOPE", "ChildSpan", "ChildSpans", "EndedChild"]

SCOPE = "eaas"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


class ChildSpan:
    """A running span of a traced request; call `end`.

    Attributes:
        context: Context of this span.
        attributes: May be extended until the end.
        start_ns: Wall-clock time in nanoseconds.
    """

    __slots__ = (
        "_of",
        "attributes",
        "context",
        "kind",
        "links",
        "name",
        "parent",
        "start_ns",
        "status",
    )

    def __init__(
        self,
        of: ChildSpans,
        name: str,
        parent: SpanContext,
        kind: SpanKind,
        attributes: dict[str, str | int | float],
        links: tuple[SpanContext, ...],
    ) -> None:
        self.context = SpanContext(parent.trace_id, of.new_id(), False, _SAMPLED)
        self.attributes = attributes
        self.name = name
        self.parent = parent
        self.kind = kind
        self.links = links
        self.status = _UNSET
        self._of = of
        self.start_ns = time.time_ns()

    def fail(self, reason: str) -> None:
        """Mark the span as failed, with the reason; `end` must still be called."""
        self.status = Status(StatusCode.ERROR, reason)

    def end(self) -> None:
        """End the span and pass it to the span processor, which sends it to the collector in a batch."""
        self._of.processor.on_end(EndedChild(self._of, self, time.time_ns()))


class EndedChild(ReadableSpan):
    """An ended span in the form that the SDK's processors and exporters read.

    Attributes:
        child: The span.
        end_ns: Wall-clock time in nanoseconds.
    """

    def __init__(self, of: ChildSpans, child: ChildSpan, end_ns: int) -> None:
        super().__init__(
            child.name,
            child.context,
            child.parent,
            of.resource,
            child.attributes,
            links=tuple(map(Link, child.links)),
            kind=child.kind,
            status=child.status,
            start_time=child.start_ns,
            end_time=end_ns,
            instrumentation_scope=of.scope,
        )
        self.child = child
        self.end_ns = end_ns


class ChildSpans:
    """Creates child spans of sampled spans in one process.

    Args:
        provider: Provides the resource and new ids.
        processor: Receives ended spans.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self.processor = processor
        self.resource = provider.resource
        # The scope equals that of the SDK's tracer with this name.
        self.scope = InstrumentationScope(SCOPE, "", "")
        self.new_id = provider.id_generator.generate_span_id

    def start(
        self,
        name: str,
        parent: SpanContext,
        attributes: dict[str, str | int | float],
        kind: SpanKind = SpanKind.INTERNAL,
        links: Iterable[SpanContext] = (),
    ) -> ChildSpan:
        """Start a child span; `parent` must be sampled, `links` are related spans of other traces."""
        return ChildSpan(self, name, parent, kind, attributes, tuple(links))

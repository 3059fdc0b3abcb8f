"""Spans below a sampled one, at a tenth of the SDK's cost.

A traced request has hundreds of them, one for each layer, dispatch and server batch of each token. For each,
the SDK asks a sampler, looks at every attribute and takes locks. None of that is needed where the parent is
sampled and attributes are plain numbers and strings. What comes out is the SDK's `ReadableSpan`, for any
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
    """One that runs. End it.

    Attributes:
        context: Its own.
        attributes: May be added to until its end.
        start_ns: On the wall clock. Told, never compared with another time here.
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
        """It is an error."""
        self.status = Status(StatusCode.ERROR, reason)

    def end(self) -> None:
        """It is over."""
        self._of.processor.on_end(EndedChild(self._of, self, time.time_ns()))


class EndedChild(ReadableSpan):
    """What the SDK's processors and exporters take.

    Attributes:
        child: The span that ended.
        end_ns: When, on the wall clock.
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
    """Makes them.

    Args:
        provider: That of the process: its resource, and ids as it draws them.
        processor: Gets those that ended.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self.processor = processor
        self.resource = provider.resource
        # As the SDK has it of a tracer that was asked for by name alone.
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
        """One begins. `parent` is sampled; `links` are spans elsewhere that it is for, too."""
        return ChildSpan(self, name, parent, kind, attributes, tuple(links))

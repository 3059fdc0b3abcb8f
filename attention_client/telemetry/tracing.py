"""OpenTelemetry spans, made in an attention client, of layer calls and dispatches of sampled requests.

    request                       a generation, from its arrival to its last token; sampled by the frontend
      layer                       one call of one MoE layer for the request's batch
        dispatch                  one request to one expert server
          server batch            made by that server (`expert_server.loop.tracing`)

A forward pass runs a batch of requests. Its layer spans are children of the first sampled request and linked
to the others, so each span exists once. A batch without a sampled request has no spans and no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from eaas.telemetry.tracing import Tracing, unpack

if TYPE_CHECKING:
    from eaas.telemetry.spans import ChildSpan

__all__ = ["LayerTraces"]


class LayerTraces:
    """Traces of one attention client's layer calls, made by the engine's thread.

    Args:
        tracing: Makes spans.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._spans = tracing.children
        self._traced: Callable[[], Sequence[bytes]] = tuple

    def watch(self, traced: Callable[[], Sequence[bytes]]) -> None:
        """Set how to get the traces of the requests in the running forward pass: parents of layer spans."""
        self._traced = traced

    def layer(self, layer: int, tokens: int) -> ChildSpan | None:
        """Start the span of a layer call. Returns None if its batch has no sampled request."""
        traced = self._traced()
        if not traced:
            return None
        first, *others = filter(None, map(unpack, traced))
        return self._spans.start(
            "layer", first, {"eaas.layer": layer, "eaas.tokens": tokens}, links=others
        )

    def dispatch(self, layer: ChildSpan, server: str, tokens: int) -> ChildSpan:
        """Start the span of one request to a server, in its layer's span; the server adds its own below."""
        return self._spans.start(
            "dispatch",
            layer.context,
            {"eaas.server": server, "eaas.tokens": tokens},
            SpanKind.CLIENT,
        )

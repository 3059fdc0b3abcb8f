"""Spans from a request's root to the server's batch, in memory: parents, links and what leaves no span."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from arena_server import Views
from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call.call import Arguments, LayerCall
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.tracing import LayerTraces
from eaas.config import TelemetryConfig
from eaas.errors import ConfigError, ExpertsUnavailableError
from eaas.telemetry import Tracing, start_tracing
from eaas.types import Placement
from eaas.wire.slot import read_trace
from frontend.tracing import RequestTraces
from http_box import Box
from transport_bench import EXPERTS, Client, Server, eventually, some

pytestmark = pytest.mark.integration

CALL_S = 10.0


class Spans:
    """A tracer provider as in a process, with an exporter that keeps the spans in memory."""

    def __init__(self, sampling: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sampling)))
        self.tracing = Tracing(provider, SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def one_server(connection: Connection) -> Views:
    """A view of one connection."""
    holds_LSE = np.ones((2, 1, EXPERTS), np.bool_)
    placement = Placement(1, ("server",), holds_LSE, holds_LSE.astype(np.float32))
    return Views([ClusterView(placement, (connection,))])


class World:
    """A client and a server whose spans go to one exporter."""

    def __init__(self, spans: Spans, transport: str = "shm", checksum: bool = False) -> None:
        self.server = Server(tracing=spans.tracing)
        self.client = Client(transport, checksum)
        self.requests = RequestTraces(spans.tracing)
        self.traces = LayerTraces(spans.tracing)
        self.begun: dict[str, bytes] = {}
        self.in_batch: tuple[str, ...] = ("r1",)
        self.traces.watch(
            lambda: [trace for name in self.in_batch if (trace := self.begun.get(name))]
        )
        self.context = CallContext(
            replicas=one_server(self.client.connect(self.server.address)),
            policy=dispatch_policy("weights"),
            timeout_s=CALL_S,
            attempt_timeout_s=CALL_S,
            hedges=HedgeBudget(0.0),
            metrics=self.client.metrics,
            traces=self.traces,
        )

    def begin(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        self.begun[name] = self.requests.begin(name, prompt_tokens, max_tokens)

    def end(self, name: str, reason: str, tokens: int) -> None:
        self.requests.end(name, reason, tokens)
        del self.begun[name]

    def call(self, layer: int = 1) -> torch.Tensor:
        x_TH, drawn_TK, scores_TK = some(3)
        ids_TK = torch.from_numpy(drawn_TK).clamp(min=0)
        arguments = Arguments(layer, x_TH, ids_TK, torch.from_numpy(scores_TK), None)
        return LayerCall(self.context, arguments).finish()

    def traced_slots(self) -> list[bytes]:
        arena = self.server.arena
        found = [read_trace(arena.buffer, arena.request_offset(i)) for i in range(arena.slots)]
        return [trace for trace in found if trace]

    def close(self) -> None:
        for connection in self.client.connections:
            connection.close()
        self.server.close()


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def of(*args: Any) -> World:
        made.append(World(*args))
        return made[-1]

    yield of
    for world in made:
        world.close()


def parent_of(child: ReadableSpan) -> tuple[int, int]:
    assert child.parent is not None
    return child.parent.trace_id, child.parent.span_id


def id_of(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


@pytest.mark.parametrize(
    ("transport", "checksum"), [("shm", False), ("shm", True), ("grpc", False), ("grpc", True)]
)
def test_request_layer_dispatch_server_batch(
    make: Callable[..., World], transport: str, checksum: bool
) -> None:
    spans = Spans()
    world = make(spans, transport, checksum)
    world.begin("r1", prompt_tokens=5, max_tokens=7)
    world.call(layer=1)
    world.requests.first_token("r1")
    world.end("r1", "length", 7)
    eventually(lambda: spans.named("server batch"))
    request, layer, dispatch, batch = (
        spans.one(name) for name in ("request", "layer", "dispatch", "server batch")
    )
    assert request.parent is None
    assert parent_of(layer) == id_of(request)
    assert parent_of(dispatch) == id_of(layer)
    assert parent_of(batch) == id_of(dispatch)
    assert request.attributes == {
        "eaas.request_id": "r1",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert [event.name for event in request.events] == ["first token"]
    assert layer.attributes == {"eaas.layer": 1, "eaas.tokens": 3}
    assert dispatch.attributes == {
        "eaas.server": "server",
        "eaas.tokens": 3,
        "eaas.outcome": "answered",
    }
    assert batch.attributes is not None
    assert batch.attributes["eaas.waited_s"] >= 0  # type: ignore[operator]
    told = {name: batch.attributes[f"eaas.{name}"] for name in ("server", "layer", "requests")}
    assert told == {"server": "server", "layer": 1, "requests": 1}


def test_a_request_that_is_not_sampled_leaves_nothing(make: Callable[..., World]) -> None:
    spans = Spans(sampling=0.0)
    world = make(spans)
    world.begin("r1", 5, 7)
    world.call()
    assert not world.traced_slots()
    world.requests.first_token("r1")
    world.end("r1", "stop", 1)
    assert spans.exporter.get_finished_spans() == ()


def test_a_request_outside_the_batch_gets_no_spans_of_it(make: Callable[..., World]) -> None:
    spans = Spans()
    world = make(spans)
    world.begin("waits", 5, 7)
    world.call()
    assert not world.traced_slots()
    assert not spans.exporter.get_finished_spans()
    # A slot does not keep the trace of its last request.
    world.in_batch = ("waits",)
    world.call()
    assert world.traced_slots()
    world.end("waits", "stop", 1)
    for _ in range(8):
        world.call()
    assert not world.traced_slots()
    assert len(spans.named("layer")) == 1


def test_the_others_of_a_batch_are_linked(make: Callable[..., World]) -> None:
    spans = Spans()
    world = make(spans)
    world.in_batch = ("r1", "unknown", "r2")
    for name in ("r1", "r2"):
        world.begin(name, 1, 1)
    world.call()
    for name in ("r1", "r2"):
        world.end(name, "stop", 1)
    first, second = spans.named("request")
    layer = spans.one("layer")
    assert parent_of(layer) == id_of(first)
    assert [(link.context.trace_id, link.context.span_id) for link in layer.links] == [
        id_of(second)
    ]


def test_a_layer_call_that_fails_says_so(make: Callable[..., World]) -> None:
    spans = Spans()
    world = make(spans)
    world.begin("r1", 1, 1)
    world.client.connections[0].lose("for the test")
    world.context = CallContext(
        **{**vars(world.context), "timeout_s": 0.05, "attempt_timeout_s": 0.05}
    )
    with pytest.raises(ExpertsUnavailableError):
        world.call()
    world.end("r1", "error", 0)
    assert spans.one("layer").status.status_code is StatusCode.ERROR
    assert spans.one("request").status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_the_engine_knows_whose_forward_pass_it_is(kind: str) -> None:
    """In a batch, and one request at a time."""
    spans = Spans()
    with Box(kind, tracing=spans.tracing) as box:
        box.complete(max_tokens=4)
    request = spans.one("request")
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    layers = spans.named("layer")
    assert len(layers) >= 4
    assert {parent_of(layer) for layer in layers} == {id_of(request)}


def test_off_is_the_default_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_tracing(TelemetryConfig(), "attention-client", "a") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'expert-as-a-service\[otel\]'"):
        start_tracing(TelemetryConfig(traces=True), "attention-client", "a")

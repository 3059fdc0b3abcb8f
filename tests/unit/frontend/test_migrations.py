"""What the metrics and traces of a frontend say about requests that move between engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from eaas.generation.work import Delivery
from eaas.telemetry import Tracing
from engine_sim import EngineWorld, work_of
from frontend.engines.pool import Deliver, EngineInfo, EnginePool, Send
from frontend.metrics import EngineMetrics
from frontend.tracing import RequestTraces

FAULTS: dict[str, tuple[str, Callable[[EngineWorld], None]]] = {
    "killed": ("lost", lambda world: world.kill("a")),
    "stopped": ("suspect", lambda world: world.stop("a")),
    "drained": ("draining", lambda world: world.drain("a")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pause_is_what_the_user_waits(fault: str) -> None:
    reason, happens = FAULTS[fault]
    world = EngineWorld(seed=1)
    world.start("a")
    world.run(0.1)
    world.submit(work_of("request", [7, 8, 9], 300, ends=False))
    # Engine b comes 2 s later: a drained engine serves on until then.
    world.at_token("request", 20, lambda: happens(world))
    world.later(2.0, lambda: world.start("b"))
    world.run(60.0)
    assert world.ended == {"request": None}
    ((request, why, seconds),) = world.resumed
    assert (request, why) == ("request", reason)
    if fault == "drained":
        assert seconds < 0.2
    else:
        assert seconds == pytest.approx(world.pauses["request"])
        assert seconds > 1.5


def test_two_deaths_in_one_pause_are_one_pause() -> None:
    world = EngineWorld(seed=2)
    world.start("a")
    world.run(0.1)
    world.submit(work_of("request", [7], 64, ends=False))
    world.at_token("request", 5, lambda: world.kill("a"))
    world.later(1.0, lambda: world.start("b", step_s=5.0))  # it dies before its first token
    world.later(4.0, lambda: world.kill("b"))
    world.later(6.0, lambda: world.start("c"))
    world.run(60.0)
    assert world.moves == ["lost", "lost"]
    ((_, _, seconds),) = world.resumed
    assert seconds == pytest.approx(world.pauses["request"])
    assert seconds > 5.0


def test_a_request_that_only_waited_in_a_queue_has_no_pause() -> None:
    world = EngineWorld(seed=3)
    world.start("a", batch=1)
    world.run(0.1)
    for name in ("first", "second"):
        world.submit(work_of(name, [7], 100, ends=False))
    world.later(0.5, lambda: world.kill("a"))
    world.later(1.0, lambda: world.start("b"))
    world.run(60.0)
    assert world.moves == ["lost", "lost"]
    assert [name for name, _, _ in world.resumed] == ["first"]


def test_metrics_and_spans() -> None:
    exporter = InMemorySpanExporter()
    traces = RequestTraces(Tracing(TracerProvider(), SimpleSpanProcessor(exporter)))
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, traces)
    traces.begin("a", 3, 64)
    metrics.moved("lost")
    metrics.paused("a", "lost", 0.3)
    metrics.paused("not sampled", "draining", 0.1)
    traces.end("a", "stop", 64)
    assert registry.get_sample_value("eaas_frontend_migrations_total", {"reason": "lost"}) == 1
    assert registry.get_sample_value("eaas_frontend_pause_seconds_count") == 2
    assert registry.get_sample_value("eaas_frontend_pause_seconds_sum") == pytest.approx(0.4)
    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert event.name == "moved"
    assert event.attributes == {"eaas.reason": "lost", "eaas.pause_s": 0.3}


@pytest.mark.parametrize(
    ("died", "tokens", "deaths"), [(True, 0, 2), (True, 2, 4), (False, 0, None), (False, 2, None)]
)
def test_only_deaths_without_a_token_make_a_request_poisonous(
    died: bool, tokens: int, deaths: int | None
) -> None:
    """Two engines may well die within the seconds in which a request begins again.

    On a machine with too little processor time leases end again and again, of engines that live.

    Args:
        tokens: So many engines deliver a token before they are lost.
        deaths: Engines that are lost before the request is given up.
    """
    pool = EnginePool()
    actions = pool.submit(work_of("request", [7], 64), 0.0)
    for number in range(6):
        name, now = f"a@{number}", float(number)
        actions += pool.join(EngineInfo(name, ("model",)), now)
        sent = [each for each in actions if isinstance(each, Send) and each.engine == name]
        actions = []
        for each in sent:
            actions += pool.deliver(name, each.attempt, Delivery([]), now)  # it is computed
            if number < tokens:
                actions += pool.deliver(name, each.attempt, Delivery([number + 20]), now)
        actions += pool.lose(name, now, died=died)
        ended = [each for each in actions if isinstance(each, Deliver) and each.delivery.finished]
        if ended:
            break
    assert (number + 1 if ended else None) == deaths
    assert len(pool) == (1 if deaths is None else 0)

"""The balancer's gRPC service and its metrics."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import generate_latest

from balancer import service as service_module
from balancer.live.hotness import Reading, Work
from balancer.live.state import LoadState
from balancer.live.tuning import Signals
from balancer.metrics import BalancerMetrics
from balancer.planner.layout import Settings
from balancer.service import BalancerService
from eaas.config import BalancerConfig
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.spares import SpareReplicas
from eaas.types import Member, MemberState, Placement, Role


class Aborted(Exception):
    """Raised by `abort`, as gRPC's does."""


class Context:
    """A call, or a stream that stays open."""

    def add_callback(self, callback: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted


def serving(fewest: int = 1) -> BalancerService:
    return BalancerService(lambda question: fewest, None, None, 1.0, 64)  # type: ignore[arg-type]


@pytest.fixture
def service() -> BalancerService:
    return serving()


# -- placements --------------------------------------------------------------------------------------


def placement(epoch: int) -> Placement:
    holds_LSE = np.ones((2, 1, 3), bool)
    return Placement(epoch, ("s0",), holds_LSE, holds_LSE.astype(np.float32))


def spares(epoch: int, *experts: int) -> SpareReplicas:
    return SpareReplicas(epoch, {"s0": frozenset((1, expert) for expert in experts)})


def watch_placement(
    service: BalancerService, known: int = 0
) -> Iterator[pb.WatchPlacementResponse]:
    return service.WatchPlacement(pb.WatchPlacementRequest(known_epoch=known), Context())


def said(response: pb.WatchPlacementResponse) -> tuple[int, int, SpareReplicas | None]:
    """Epoch of the placement sent (0: none), current epoch, spare replicas sent."""
    sent = response.placement.epoch if response.HasField("placement") else 0
    has_spares = response.HasField("spares")
    spares = SpareReplicas.from_proto(response.spares) if has_spares else None
    return sent, response.epoch, spares


def test_each_change_is_sent_once(service: BalancerService, monkeypatch: Any) -> None:
    monkeypatch.setattr(service_module, "STREAM_SIGN_S", 0.01)
    service.publish(placement(1))
    stream = watch_placement(service)
    # Those of a former balancer are void.
    assert said(next(stream)) == (1, 1, SpareReplicas())
    assert said(next(stream)) == (0, 1, None)
    service.publish_spares(spares(1, 0, 2))
    assert said(next(stream)) == (0, 1, spares(1, 0, 2))
    assert said(next(stream)) == (0, 1, None)
    service.publish(placement(2))
    assert said(next(stream)) == (2, 2, None)
    service.publish_spares(spares(2))
    assert said(next(stream)) == (0, 2, spares(2))


# -- requests to scale -------------------------------------------------------------------------------


def watch_scale(service: BalancerService, known: int) -> Iterator[pb.WatchScaleResponse]:
    return service.WatchScale(pb.WatchScaleRequest(known_wish=known), Context())


def test_a_new_stream_does_not_repeat_a_number(service: BalancerService) -> None:
    first = watch_scale(service, 0)
    next(first)
    service.Scale(pb.ScaleRequest(servers=5), Context())
    answer = next(first)
    assert answer.servers == 5
    again = watch_scale(service, answer.wish)
    assert next(again).wish == answer.wish
    service.Scale(pb.ScaleRequest(servers=5), Context())
    assert next(again).servers == 5
    # It was said while the stream was broken.
    late = watch_scale(service, answer.wish)
    assert [next(late).servers, next(late).servers] == [0, 5]


def test_another_balancer_counts_from_the_beginning() -> None:
    stream = watch_scale(serving(), 3)
    assert next(stream).servers == 0
    known = next(stream)
    assert (known.servers, known.wish) == (0, 0)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (0, "0 servers would hold no experts"),
        (1, "1 server cannot hold each expert on 3"),
        (2, "give at least 3, or start the cluster with a lower --redundancy"),
        (65, "balancer.max_servers allows 64 at most"),
        (1_000_000, "1,000,000 servers: balancer.max_servers allows 64"),
    ],
)
def test_a_number_of_servers_has_bounds(servers: int, words: str) -> None:
    service = serving(fewest=3)
    # Kept: a launcher that is gone takes no wishes.
    launcher = watch_scale(service, 0)
    next(launcher)
    context = Context()
    with pytest.raises(Aborted):
        service.Scale(pb.ScaleRequest(servers=servers), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in context.details


def test_a_refusal_belongs_to_its_request(service: BalancerService) -> None:
    launcher = watch_scale(service, 0)
    next(launcher)
    first = service.Scale(pb.ScaleRequest(servers=4), Context()).wish
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="no room"), Context())
    told = service.GetScale(pb.GetScaleRequest(), Context())
    assert (told.wish, told.refusal, told.fewest, told.most) == (first, "no room", 1, 64)
    second = service.Scale(pb.ScaleRequest(servers=5), Context()).wish
    assert second != first
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="late"), Context())
    assert service.GetScale(pb.GetScaleRequest(), Context()).refusal == ""


L, E = 2, 4


def member(name: str) -> Member:
    return Member(name, Role.EXPERT_SERVER, 1, "h", f"{name}:1", MemberState.SERVING)


def test_the_figures_of_a_placement_and_its_load() -> None:
    load = LoadState(BalancerConfig())
    holds_LSE = np.zeros((L, 2, E), bool)
    holds_LSE[:, 0, :2] = holds_LSE[:, 1, 2:] = True
    placement = Placement(5, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))
    now = [10.0]
    wanted = Settings(policy="eplb", tuned={"k": 0.5, "budget": 3})
    signals = Signals(burstiness=0.1, link_load=0.75)
    metrics = BalancerMetrics(load, lambda: wanted, lambda: signals, lambda: now[0])
    assert b"eaas_balancer_epoch" not in generate_latest(metrics.registry)
    metrics.published(placement)
    tokens = {"a": np.array([[30, 30, 0, 0]] * L), "b": np.array([[0, 0, 10, 10]] * L)}
    members = {name: member(name) for name in ("a", "b")}
    for n in (0, 1):
        readings = {s: Reading(1, n + 1, n * t, Work(float(n))) for s, t in tokens.items()}
        load.stepped(readings, members, placement, 1000)
    now[0] = 13.0

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"eaas_balancer_{name}", labels)

    assert value("epoch") == 5
    assert value("epoch_age_seconds") == 3.0
    assert value("par", layer="1") == pytest.approx(1.5)
    assert value("balancedness", layer="1") == pytest.approx(1 / 1.5)
    assert value("gap", layer="0") == pytest.approx(1.5)
    assert value("server_tokens", server="a") == 60 * L
    assert value("server_speed", server="a") == 1.0
    assert value("hotness", layer="1", expert="0") == 30
    assert value("knob", knob="budget") == 3
    assert value("signal", signal="link_load") == 0.75
    assert value("signal", signal="latency") is None
    assert (metrics.balancedness_L() == 1 / 1.5).all()

    entry = pb.HistoryEntry(
        trigger="drift", verdict=pb.VERDICT_MOVES, transit=3, bytes=3000, plan_s=0.5
    )
    metrics.entry(entry)
    entry.prepare_s, entry.retire_s = 2.0, 1.0
    metrics.entry(entry)
    assert value("decisions_total", trigger="drift", verdict="moves") == 1
    assert value("moves_total") == 3
    assert value("moved_bytes_total") == 3000
    for phase, seconds in (("plan", 0.5), ("prepare", 2.0), ("retire", 1.0)):
        assert value("phase_seconds_sum", phase=phase) == seconds
    assert b"eaas_balancer_hotness" in generate_latest(metrics.registry)

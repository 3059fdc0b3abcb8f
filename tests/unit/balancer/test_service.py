"""The balancer's gRPC service: streams of placements and spare replicas, and requests to scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from balancer import service as service_module
from balancer.service import BalancerService
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.spares import SpareReplicas
from eaas.types import Placement


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

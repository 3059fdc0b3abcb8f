"""A client's stream of placements and spare replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from balancer import service as service_module
from balancer.service import BalancerService
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.spares import SpareReplicas
from eaas.types import Placement


class Context:
    """A stream that stays open."""

    def add_callback(self, callback: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True


@pytest.fixture
def service() -> BalancerService:
    return BalancerService(lambda question: 1, None, None, 1.0, 64)  # type: ignore[arg-type]


def placement(epoch: int) -> Placement:
    holds_LSE = np.ones((2, 1, 3), bool)
    return Placement(epoch, ("s0",), holds_LSE, holds_LSE.astype(np.float32))


def spares(epoch: int, *experts: int) -> SpareReplicas:
    return SpareReplicas(epoch, {"s0": frozenset((1, expert) for expert in experts)})


def watch(service: BalancerService, known: int = 0) -> Iterator[pb.WatchPlacementResponse]:
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
    stream = watch(service)
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


def test_a_new_stream_begins_with_what_the_client_lacks(service: BalancerService) -> None:
    service.publish(placement(3))
    service.publish_spares(spares(3, 1))
    assert said(next(watch(service))) == (3, 3, spares(3, 1))
    assert said(next(watch(service, 3))) == (0, 3, spares(3, 1))
    # A client of a later balancer keeps its placement.
    assert said(next(watch(service, 4))) == (0, 3, spares(3, 1))

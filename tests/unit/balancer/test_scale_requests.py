"""The balancer keeps the wanted number of servers for the launcher, each request once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from balancer.service import BalancerService
from eaas.rpc.v1 import balancer_pb2 as pb


class Context:
    def add_callback(self, callback: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True


def watch(service: BalancerService, known: int) -> Iterator[pb.WatchScaleResponse]:
    return service.WatchScale(pb.WatchScaleRequest(known_wish=known), Context())


def test_a_new_stream_does_not_repeat_a_number() -> None:
    service = BalancerService(lambda question: 1, None, None, 1.0, 64)
    first = watch(service, 0)
    next(first)
    service.Scale(pb.ScaleRequest(servers=5), Context())
    said = next(first)
    assert said.servers == 5
    again = watch(service, said.wish)
    assert next(again).wish == said.wish
    service.Scale(pb.ScaleRequest(servers=5), Context())
    assert next(again).servers == 5
    # It was said while the stream was broken.
    late = watch(service, said.wish)
    assert [next(late).servers, next(late).servers] == [0, 5]


def test_another_balancer_counts_from_the_beginning() -> None:
    stream = watch(BalancerService(lambda question: 1, None, None, 1.0, 64), 3)
    assert next(stream).servers == 0
    known = next(stream)
    assert (known.servers, known.wish) == (0, 0)


class Aborted(Exception):
    """Raised by `abort`, as gRPC's does."""


class Refusing(Context):
    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted


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
    service = BalancerService(lambda question: 3, None, None, 1.0, 64)
    # Kept: a launcher that is gone takes no wishes.
    launcher = watch(service, 0)
    next(launcher)
    context = Refusing()
    with pytest.raises(Aborted):
        service.Scale(pb.ScaleRequest(servers=servers), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in context.details


def test_a_refusal_belongs_to_its_request() -> None:
    service = BalancerService(lambda question: 1, None, None, 1.0, 64)
    launcher = watch(service, 0)
    next(launcher)
    first = service.Scale(pb.ScaleRequest(servers=4), Context()).wish
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="no room"), Context())
    told = service.GetScale(pb.GetScaleRequest(), Context())
    assert (told.wish, told.refusal, told.fewest, told.most) == (first, "no room", 1, 64)
    second = service.Scale(pb.ScaleRequest(servers=5), Context()).wish
    assert second != first
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="late"), Context())
    assert service.GetScale(pb.GetScaleRequest(), Context()).refusal == ""

"""Spare replicas as values and as messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.rpc.v1 import common_pb2 as pb
from eaas.spares import SpareReplicas

LAYERS = 3
PLACES = st.frozensets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 9)))
SPARES = st.builds(
    SpareReplicas, st.just(7), st.dictionaries(st.sampled_from(["a", "b", "c"]), PLACES)
)


@given(SPARES)
def test_a_message_has_them_all(spares: SpareReplicas) -> None:
    data = spares.to_proto(LAYERS).SerializeToString()
    assert SpareReplicas.from_proto(pb.SpareReplicas.FromString(data)) == spares


@given(SPARES, SPARES)
def test_they_are_sets_by_server(one: SpareReplicas, other: SpareReplicas) -> None:
    both = one.intersection(other)
    assert both.epoch == 7
    assert all(both.of(server) == one.of(server) & other.of(server) for server in "abc")
    assert len(one) == sum(len(one.of(server)) for server in "abc")
    assert all(one.held.values())
    without = one.without("a")
    assert not without.of("a")
    assert [without.of(server) for server in "bc"] == [one.of(server) for server in "bc"]


def test_a_server_is_there_once() -> None:
    message = SpareReplicas(7, {"a": frozenset({(0, 1)})}).to_proto(LAYERS)
    message.servers.append(pb.ServerPlacement(server_id="a"))
    with pytest.raises(ValueError, match="twice"):
        SpareReplicas.from_proto(message)

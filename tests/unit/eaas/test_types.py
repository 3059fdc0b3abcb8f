"""Value types and their conversion to and from protobuf messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.rpc.v1 import common_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Placement, Role, ServerReach

NAMES = st.text(max_size=20)
COUNTS = st.integers(0, 2**31 - 1)
# float32 on the wire would change others.
FLOATS = st.floats(0, 1e6, width=32)
SHAPES = st.builds(
    ModelShape,
    model_type=NAMES,
    num_experts=st.integers(0, 2**16),
    hidden_size=COUNTS,
    top_k=COUNTS,
    layer_names=st.lists(NAMES, max_size=4).map(tuple),
    dtype=NAMES,
    digest=NAMES,
)
MEMBERS = st.builds(
    Member,
    id=NAMES,
    role=st.sampled_from(Role),
    pid=COUNTS,
    host=NAMES,
    address=NAMES,
    state=st.sampled_from(MemberState),
    incarnation=COUNTS,
    experts=COUNTS,
    in_flight=COUNTS,
    model=st.none() | SHAPES,
    progress=COUNTS,
    # 0 means unset, which is read as 1.
    speed=FLOATS.filter(bool),
    memory_bytes=COUNTS,
    expert_bytes=COUNTS,
    node=NAMES,
    transports=st.lists(NAMES, max_size=3).map(tuple),
    silence_s=FLOATS,
    epoch=COUNTS,
    busy_s=FLOATS,
    loading_bytes=COUNTS,
    loaded_bytes=COUNTS,
    reach=st.none()
    | st.lists(
        st.builds(
            ServerReach,
            server_id=NAMES,
            server_incarnation=COUNTS,
            reason=NAMES,
            lost=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_layers, num_servers, num_experts = (draw(st.integers(0, 4)) for _ in range(3))
    shape = (num_layers, num_servers, num_experts)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    holds_LSE = random.random(shape) < 0.5
    shares_LSE = np.where(holds_LSE, random.random(shape), 0).astype(np.float32)
    servers = tuple(f"server-{s}" for s in range(num_servers))
    return Placement(draw(COUNTS), servers, holds_LSE, shares_LSE)


@given(MEMBERS)
def test_members_round_trip(member: Member) -> None:
    assert Member.from_proto(pb.Member.FromString(member.to_proto().SerializeToString())) == member


@given(MEMBERS, st.integers(1, 2**32 - 1))
def test_a_member_refers_to_a_model_of_its_snapshot(member: Member, number: int) -> None:
    shape = ModelShape("m", 4, 8, 2, ("a",), "float32", "0" * 64)
    with pytest.raises(ValueError, match=f"model {number} of 0"):
        Member.from_proto(member.to_proto(model_number=number))
    message = member.to_proto(model=None, model_number=1)
    assert Member.from_proto(message, [shape]) == replace(member, model=shape)


@given(placements())
def test_placements_round_trip(placement: Placement) -> None:
    back = Placement.from_proto(pb.Placement.FromString(placement.to_proto().SerializeToString()))
    assert (back.epoch, back.servers) == (placement.epoch, placement.servers)
    np.testing.assert_array_equal(back.holds_LSE, placement.holds_LSE)
    np.testing.assert_array_equal(back.shares_LSE, placement.shares_LSE)


@given(placements())
def test_holdings_are_a_servers_part_of_the_message(placement: Placement) -> None:
    message = placement.to_proto()
    for server_id in placement.servers:
        place = placement.servers.index(server_id)
        assert placement.holdings_of(server_id) == list(message.servers[place].layers)
    layers = placement.holds_LSE.shape[0]
    assert (
        placement.holdings_of("of another cluster, with a name above 20") == [pb.Holding()] * layers
    )


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_numbers(number: int) -> None:
    with pytest.raises(ValueError, match=r"(?i)unknown|enum"):
        Role.from_number(number)
    with pytest.raises(ValueError, match=r"(?i)unknown|enum"):
        MemberState.from_number(number)


def wire(num_layers: int = 1, num_experts: int = 2, **holding: list[float]) -> pb.Placement:
    server = pb.ServerPlacement(server_id="a", layers=[pb.Holding(**holding)])  # type: ignore[arg-type]
    return pb.Placement(epoch=1, num_layers=num_layers, num_experts=num_experts, servers=[server])


@pytest.mark.parametrize(
    "message",
    [
        wire(experts=[2], shares=[1.0]),
        wire(experts=[0], shares=[]),
        wire(num_layers=2, experts=[0], shares=[1.0]),
    ],
    ids=["expert out of range", "shares missing", "layers missing"],
)
def test_an_inconsistent_placement(message: pb.Placement) -> None:
    with pytest.raises(ValueError, match="a: "):
        Placement.from_proto(message)


def test_a_placement_of_nobody_may_not_take_all_memory() -> None:
    with pytest.raises(ValueError, match="4096 layers, 0 servers and 8192 experts"):
        Placement.from_proto(pb.Placement(num_layers=4096, num_experts=8192))


def test_names_and_experts_are_there_once() -> None:
    message = wire(experts=[0, 0], shares=[0.5, 0.5])
    with pytest.raises(ValueError, match="server 0 has expert 0 of layer 0 twice"):
        Placement.from_proto(message)
    message = wire(experts=[0], shares=[1.0])
    message.servers.append(message.servers[0])
    with pytest.raises(ValueError, match="a is 2 times in the placement"):
        Placement.from_proto(message)


@pytest.mark.parametrize("servers", [(), ("a", "b")])
def test_arrays_that_do_not_fit(servers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="holds_LSE"):
        Placement(1, servers, np.ones((1, 1, 2), np.bool_), np.ones((1, 1, 2), np.float32))
    with pytest.raises(ValueError, match="shares_LSE"):
        Placement(1, ("a",), np.ones((1, 1, 2), np.bool_), np.ones((1, 1, 3), np.float32))

"""Property: any failure gives the right sum or one typed error."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.layer_call.call import ClusterView
from eaas.errors import (
    ExpertsUnavailableError,
    WrongRequestError,
)
from layer_world import (
    FAULTS,
    TIMEOUT_S,
    Call,
    FakeConnection,
    FakeReplicas,
    World,
    call_of,
    expected_of,
    view_of,
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, Call, list[FakeConnection]]:
    servers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    world = World()
    outcome = st.sampled_from(("ok", *FAULTS[:-1])) if draw(st.booleans()) else st.just("ok")
    if draw(st.integers(0, 9)) == 0:
        outcome = st.sampled_from(("ok", *FAULTS))
    connections = [
        FakeConnection(
            world,
            f"s{i}",
            tuple(draw(st.lists(outcome, max_size=4))),
            delay_s=draw(st.sampled_from((0.0, 0.001, 0.05, 0.3))),
            forever=draw(st.sampled_from(("ok", "ok", "silent", "stale", "busy"))),
            room=draw(st.integers(1, 8)),
            owes=draw(st.booleans()),
        )
        for i in range(servers)
    ]

    def view(epoch: int) -> ClusterView:
        holds_SE = rng.random((servers, experts)) < 0.7
        return view_of([c if rng.random() < 0.9 else None for c in connections], holds_SE, epoch)

    replicas = FakeReplicas(world, [view(1), view(2)], draw(st.sampled_from((0.2, 1.0, np.inf))))
    ids_TK = np.stack([rng.permutation(experts)[: min(3, experts)] for _ in range(7)])
    wanted_TK = rng.random(ids_TK.shape) < 0.8
    policy = draw(st.sampled_from(("least_loaded", "weights")))
    for connection in connections:
        for _ in range(draw(st.sampled_from((0, 30)))):  # From 20 on, late requests are hedged.
            connection.service.observe(1, 0.001)
    hedge_share = draw(st.sampled_from((0.0, 0.05, 1.0)))
    call = call_of(
        world, replicas, ids_TK, wanted_TK=wanted_TK, policy=policy, hedge_share=hedge_share
    )
    return world, call, connections


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_any_failure_gives_the_right_sum_or_one_typed_error(drawn) -> None:
    world, call, connections = drawn
    started = world.now
    try:
        out_TH = call.run()
    except (ExpertsUnavailableError, WrongRequestError):
        pass
    else:
        assert torch.equal(out_TH, expected_of(call))
    assert world.now - started <= TIMEOUT_S + 0.01
    assert not any(c.open or c.reading for c in connections)

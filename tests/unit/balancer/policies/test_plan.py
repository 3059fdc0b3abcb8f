"""What holds for every policy, errors for wrong arguments, and the time of a plan."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import balancer.policies as policies
from balancer.policies import names, plan

Arguments = dict[str, Any]


@st.composite
def problems(draw: st.DrawFn) -> Arguments:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    servers = draw(st.integers(1, 6))
    load_LE = draw(
        hnp.arrays(
            np.float64,
            (layers, experts),
            elements=st.one_of(
                st.integers(0, 4).map(float),
                st.floats(0, 1e9, allow_nan=False),
                st.floats(1e3, 1e6),
            ),
        )
    )
    slots: int | npt.NDArray[np.int64]
    kind = draw(st.sampled_from(["total", "by server", "by layer and server"]))
    if kind == "total":
        slots = draw(st.integers(experts, servers * experts))
    else:
        shape = (servers,) if kind == "by server" else (layers, servers)
        slots = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, experts + 2)))
        missing_L = experts - np.minimum(np.atleast_2d(slots), experts).sum(axis=1)
        # The last server takes what is missing; it may have to hold everything.
        slots[..., -1] += np.maximum(missing_L.max(), 0)
        slots[..., -1] = np.where(missing_L.max() > 0, experts, slots[..., -1])
    found: Arguments = {"load_LE": load_LE, "servers": servers, "slots": slots}
    if draw(st.booleans()):
        found["speeds_S"] = draw(
            hnp.arrays(np.float64, servers, elements=st.sampled_from([0.5, 1.0, 3.0]))
        )
    if draw(st.booleans()):
        found["current"] = draw(hnp.arrays(np.bool_, (layers, servers, experts)))
    return found


def slots_of(arguments: Arguments) -> npt.NDArray[np.int64]:
    layers, servers = len(arguments["load_LE"]), arguments["servers"]
    slots = np.asarray(arguments["slots"])
    if slots.ndim == 0:
        slots = np.array([(int(slots) + servers - 1 - s) // servers for s in range(servers)])
    return np.broadcast_to(slots, (layers, servers))


@pytest.mark.parametrize("policy", names())
@given(arguments=problems())
@example(arguments={"load_LE": np.zeros((2, 8)), "servers": 4, "slots": 10})
def test_a_plan_covers_fits_and_is_what_it_says(policy: str, arguments: Arguments) -> None:
    found = plan(policy, **arguments)
    load_LE = arguments["load_LE"]
    layers, experts = load_LE.shape
    servers = arguments["servers"]
    assert found.policy == policy
    assert found.holds_LSE.shape == found.shares_LSE.shape == (layers, servers, experts)
    assert (found.holds_LSE.dtype, found.shares_LSE.dtype) == (np.bool_, np.float64)
    # Covered, within the slots, shares where held.
    assert found.holds_LSE.any(axis=1).all()
    assert (found.holds_LSE.sum(axis=2) <= slots_of(arguments)).all()
    assert (found.shares_LSE[~found.holds_LSE] == 0).all()
    assert (found.shares_LSE >= 0).all()
    np.testing.assert_allclose(found.shares_LSE.sum(axis=1), 1, rtol=1e-12)
    # PAR from first principles.
    speeds_S = np.asarray(arguments.get("speeds_S", np.ones(servers)))
    for layer in range(layers):
        by_server_S = found.shares_LSE[layer] @ load_LE[layer] / speeds_S
        mean = load_LE[layer].sum() / speeds_S.sum()
        expected = by_server_S.max() / mean if mean > 0 else 1.0
        assert found.par_L[layer] == pytest.approx(expected, rel=1e-9)
    assert (found.par_L >= found.bound_L).all()
    assert (found.bound_L >= 1).all()
    assert (found.gap_L >= 1).all()
    # Transit and moves.
    if "current" in arguments:
        assert found.transit == (found.holds_LSE & ~arguments["current"]).sum()
        held_LSE = arguments["current"].copy()
        for move in found.moves:
            held_LSE[move.layer, move.server, move.expert] = move.kind == "load"
        assert (held_LSE == found.holds_LSE).all()
    else:
        assert (found.transit, found.moves) == (0, ())
    again = plan(policy, **arguments)
    assert (again.holds_LSE == found.holds_LSE).all()
    assert (again.shares_LSE == found.shares_LSE).all()


@pytest.mark.parametrize("policy", names())
def test_a_plan_is_a_current(policy: str) -> None:
    rng = np.random.default_rng(0)
    first = plan(policy, rng.random((3, 16)), 4, 20)
    second = plan(policy, rng.random((3, 16)), 4, 20, current=first)
    same = plan(policy, second.problem.load_LE, 4, 20, current=first.holds_LSE)
    for found in (second, same):
        assert found.transit == (found.holds_LSE & ~first.holds_LSE).sum()
    # The default looks at the shares of a plan, too: which replicas are of use now.
    if policy != policies.DEFAULT_POLICY:
        assert (second.holds_LSE == same.holds_LSE).all()


def test_the_bound_counts_the_replicas_that_a_hot_expert_needs() -> None:
    # Three replicas at most: a third of the load of 9 each, the mean is 10 / 4.
    found = plan("eplb", [[9.0, 1.0]], 4, 4)
    assert found.bound_L[0] == pytest.approx(3 / 2.5)
    assert found.par_L[0] == pytest.approx(3 / 2.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": "best"}, "policy 'best' is none of .*spread, eplb"),
        ({"load_LE": [[1.0, -1.0]]}, "load_LE has numbers that are negative"),
        ({"load_LE": [[1.0, float("nan")]]}, "load_LE has numbers that are negative, NaN"),
        ({"load_LE": [[1.0, float("inf")]]}, "load_LE"),
        ({"load_LE": [[1.0, 1e308]]}, "load_LE has numbers above 1e\\+30: scale them down"),
        ({"load_LE": [1.0, 2.0]}, "load_LE has shape"),
        ({"policy": ["eplb"]}, "policy .*eplb.* is none of"),
        ({"servers": None}, "servers is None"),
        ({"servers": 2.0}, "servers is 2.0"),
        ({"slots": [[1], [2, 3]]}, "slots: "),
        ({"speeds_S": ["a", "b"]}, "speeds_S: "),
        ({"current": [[[True]], [[True, False]]]}, "current: "),
        ({"load_LE": np.zeros((0, 2))}, "load_LE has shape"),
        ({"load_LE": [["a", "b"]]}, "load_LE"),
        ({"servers": 0}, "servers is 0"),
        ({"slots": 1}, "slots: 1 replicas per layer cannot cover 2 experts"),
        ({"slots": [9, 0], "load_LE": np.ones((1, 3)), "servers": 2}, None),
        ({"slots": [2, 0], "load_LE": np.ones((1, 3))}, "slots: 2 replicas"),
        ({"slots": [-1, 9]}, "slots has numbers below 0"),
        ({"slots": [1, 1, 1]}, "slots has shape"),
        ({"slots": 2.5}, "slots must be whole numbers"),
        ({"speeds_S": [1.0]}, "speeds_S has shape"),
        ({"speeds_S": [1.0, 0.0]}, "speeds_S must be finite and above 0"),
        ({"current": np.zeros((1, 2, 3), bool)}, "current has"),
        ({"current": np.zeros((1, 2, 2))}, "current has"),
        ({"nonsense": 1}, "nonsense is no knob of eplb; it has: none"),
        ({"policy": "scalpel", "budgets": 1}, "budgets is no knob of scalpel; .*budget"),
        ({"policy": "scalpel", "budget": -1}, "budget is -1"),
        ({"policy": "scalpel", "matching": "best"}, "matching is 'best'"),
        ({"policy": "scalpel", "window_WLE": np.ones((2, 1, 3))}, "window_WLE has shape"),
        ({"policy": "craft", "window_WLE": -np.ones((2, 1, 2))}, "window_WLE has numbers"),
        ({"policy": "craft", "replication_factor": -1}, "replication_factor is -1"),
        ({"policy": "scalpel", "budget": 1.5}, "budget is 1.5, must be a whole number"),
        ({"policy": "scalpel", "k": float("nan")}, "k is nan"),
        ({"policy": "scalpel", "k": -1}, "k is -1"),
        ({"policy": "scalpel", "shift_tv": -0.1}, "shift_tv is -0.1"),
        ({"policy": "scalpel", "drift_tol": "much"}, "drift_tol is 'much'"),
        ({"policy": "scalpel", "heavy_frac": 1.5}, "heavy_frac is 1.5, .* at most 1"),
        ({"policy": "craft", "replication_factor": 1.5}, "replication_factor is 1.5"),
        ({"policy": "craft", "replication_factor": "most"}, "replication_factor is 'most'"),
        ({"policy": "craft", "printed": 3}, "printed is 3"),
        ({"policy": "craft", "refinement": -1}, "refinement is -1"),
        ({"policy": "eplb-hierarchical", "groups": 0}, "groups is 0"),
        ({"policy": "eplb-hierarchical", "groups": 1.0}, "groups is 1.0"),
        ({"policy": "eplb-hierarchical", "nodes": 0}, "nodes is 0"),
        ({"policy": "eplb-hierarchical", "groups": 3}, "groups is 3"),
        ({"policy": "eplb-hierarchical", "nodes": 3}, "nodes is 3"),
    ],
)
def test_wrong_arguments_are_named(changes: Arguments, named: str | None) -> None:
    arguments: Arguments = {"policy": "eplb", "load_LE": np.ones((1, 2)), "servers": 2, "slots": 2}
    arguments |= changes
    if named is None:
        plan(**arguments)
        return
    with pytest.raises(ValueError, match=named):
        plan(**arguments)


LAYERS, EXPERTS = 58, 256


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The least of some rounds, of this thread's processor time."""
    spent = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return min(spent)


def plain_eplb(load_E: np.ndarray, servers: int, slots: int) -> list[int]:
    """DeepSeek's loops over replicas and servers for one layer; the experts of all servers."""
    count = [1] * len(load_E)
    owners = list(range(len(load_E)))
    for _ in range(slots - len(load_E)):
        hottest = max(range(len(load_E)), key=lambda e: load_E[e] / count[e])
        count[hottest] += 1
        owners.append(hottest)
    filled, held = [0.0] * servers, [0] * servers
    for expert in sorted(owners, key=lambda e: -load_E[e] / count[e]):
        room = (s for s in range(servers) if held[s] < slots // servers)
        server = min(room, key=lambda s: filled[s])
        filled[server] += load_E[expert] / count[expert]
        held[server] += 1
    return held


@pytest.mark.parametrize(("servers", "slots"), [(64, 320), (288, 576)])
def test_every_policy_is_much_faster_than_a_plain_loop(servers: int, slots: int) -> None:
    rng = np.random.default_rng(0)
    load_LE = rng.lognormal(0, 1, (LAYERS, EXPERTS))
    later_LE = load_LE * rng.lognormal(0, 0.3, load_LE.shape)
    plain_s = LAYERS * seconds(lambda: plain_eplb(load_LE[0].tolist(), servers, slots), 3)
    for policy in names():
        first = plan(policy, load_LE, servers, slots)
        for current in (None, first, first.holds_LSE):
            again = partial(plan, policy, later_LE, servers, slots, current=current)
            assert seconds(again, 4) < plain_s / 12, policy

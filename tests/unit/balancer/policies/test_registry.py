"""Policies of other packages, found by their entry points."""

from pathlib import Path

import numpy as np
import pytest

from balancer.planner.layout import Settings, Situation, lay_out
from balancer.policies import names, plan
from balancer.policies.spread import spread
from installed_package import install
from simulator import replay
from simulator.traces import generate_trace

# As docs/policies.md has it, and three that are wrong.
_MODULE = """
import numpy as np
from balancer.policies import Layout

def hottest(problem, *, skip: int = 0):
    "One replica of each expert, evenly dealt; the hottest experts go into the other slots."
    holds_LSE = np.zeros((problem.layers, problem.servers, problem.experts), bool)
    for layer, load_E in enumerate(problem.load_LE):
        order = np.argsort(-load_E, kind="stable")
        free_S = problem.slots_LS[layer].copy()
        for expert in (*order, *order[skip:]):
            server = int(np.where(holds_LSE[layer, :, expert], -1, free_S).argmax())
            if free_S[server] > 0:
                holds_LSE[layer, server, expert] = True
                free_S[server] -= 1
    return Layout.of(holds_LSE)

def nothing(problem):
    return Layout.of(np.zeros((problem.layers, problem.servers, problem.experts), bool))

def everything(problem):
    return Layout.of(np.ones((problem.layers, problem.servers, problem.experts), bool))

number = 1
"""
_BROKEN = ("everything", "gone", "nothing", "number")
LOAD_LE = np.array([[5.0, 3.0, 2.0, 1.0]])


@pytest.fixture(autouse=True)
def _other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: name for name in ("hottest", *_BROKEN)} | {"eplb": "nothing"}
    install(tmp_path, monkeypatch, "eaas.policies", "other_policies", given, _MODULE)


def test_another_package_adds_a_policy() -> None:
    assert names()[-5:] == ("everything", "gone", "hottest", "nothing", "number")
    found = plan("hottest", LOAD_LE, servers=2, slots=6)
    assert found.policy == "hottest"
    assert found.layout.count_LE.tolist() == [[2, 2, 1, 1]]
    assert plan("hottest", LOAD_LE, servers=2, slots=6, skip=2).layout.count_LE.tolist() == [
        [1, 1, 2, 2]
    ]
    with pytest.raises(ValueError, match="far is no knob of hottest; it has: skip"):
        plan("hottest", LOAD_LE, servers=2, slots=6, far=1)
    # A built-in name wins.
    assert plan("eplb", LOAD_LE, servers=2, slots=6).layout.count_LE.min() == 1


@pytest.mark.parametrize("policy", _BROKEN)
def test_what_another_package_gets_wrong_is_one_clear_error(policy: str) -> None:
    with pytest.raises(ValueError, match=f"policy '?{policy}"):
        plan(policy, LOAD_LE, servers=2, slots=6)


def test_it_is_compared_and_served_live() -> None:
    trace = generate_trace("skewed", iterations=64, layers=1, experts=16, seed=0)
    static = replay(trace, "static", servers=4, interval=16)
    assert replay(trace, "hottest", servers=4, interval=16).par_mean < static.par_mean
    holds_LSE, shares_LSE = spread(1, 4, 2, 1)
    now = Situation(("a", "b"), holds_LSE, shares_LSE, LOAD_LE, np.ones(2))
    assert (lay_out(Settings("hottest", 1, 2), now)[0].sum(axis=1) == [2, 2, 1, 1]).all()

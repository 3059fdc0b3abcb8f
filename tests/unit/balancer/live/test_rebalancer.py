"""The rebalancer over many intervals, with the planner's roll-outs, in simulated time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from balancer.live.history import History
from balancer.live.hotness import Reading, Work
from balancer.live.plans import NotNowError, PlannerSnapshot
from balancer.live.rebalancer import Rebalancer
from balancer.live.state import LoadState
from balancer.planner.layout import Layout, Settings
from eaas.config import BalancerConfig
from placement_world import FULL, GRACE_S, World, settled

L, E = FULL
NAMES = ("s1", "s2", "s3")
INTERVAL = 10
TOKENS = 4000
# A step takes a second of the world's clock.
GRACE_STEPS = int(GRACE_S) - 2


class Sim:
    """Servers that count their parts of a load; a step reads all of them."""

    def __init__(self, seed: int, redundancy: int = 1, **fields: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.world: World = settled(*NAMES, redundancy=redundancy)
        config = BalancerConfig(
            policy="fractional",
            redundancy=redundancy,
            num_redundant_experts=len(NAMES),
            step_interval=INTERVAL,
            window_size=2 * INTERVAL,
            speeds="stated",
            **fields,
        )
        layout = Layout(Settings(config.policy, config.redundancy, config.num_redundant_experts))
        self.rebalancer = Rebalancer(config, layout, LoadState(config), self._ask, History())
        self.totals_SLE = {name: np.zeros(FULL, np.int64) for name in NAMES}
        self.steps = 0
        self.changes: list[int] = []
        self.flip()

    def _ask(self, question: Any) -> Any:
        return question(self.world.planner)

    def flip(self) -> None:
        """Other experts are hot: each layer's hottest has a third of the tokens or so."""
        part_LE = 2.0 ** -np.arange(E) * np.ones((L, 1))
        self.part_LE = self.rng.permuted(part_LE / part_LE.sum(axis=1, keepdims=True), axis=1)

    def par(self) -> float:
        """PAR of the current load and placement, over live servers."""
        placement = self.world.published
        living = [s for s, name in enumerate(placement.servers) if name in self.world.stores]
        shares_LSE = placement.shares_LSE[:, living]
        shares_LSE = shares_LSE / shares_LSE.sum(axis=1, keepdims=True)
        load_LS = (shares_LSE * self.part_LE[:, None]).sum(axis=2)
        return float((load_LS.max(axis=1) / load_LS.mean(axis=1)).mean())

    def step(self) -> None:
        placement = self.world.published
        for layer in range(L):
            tokens_E = self.rng.multinomial(TOKENS, self.part_LE[layer])
            for expert, tokens in enumerate(tokens_E):
                share_S = placement.shares_LSE[layer, :, expert].astype(float)
                share_S *= [name in self.world.stores for name in placement.servers]
                for s, count in enumerate(self.rng.multinomial(tokens, share_S / share_S.sum())):
                    self.totals_SLE[placement.servers[s]][layer, expert] += count
        self.steps += 1
        readings = {
            name: Reading(1, self.steps, self.totals_SLE[name].copy(), Work())
            for name in self.world.up()
        }
        self.rebalancer.observe(readings, PlannerSnapshot.of(self.world.planner), 1000)
        self.world.wait(1.0)
        self.world.settle()
        if (self.world.published.holds_LSE != placement.holds_LSE).any():
            self.changes.append(self.steps)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_on_stationary_traffic_nothing_moves_over_fifty_intervals(seed: int) -> None:
    sim = Sim(seed)
    assert sim.par() > 1.2
    for _ in range(2 * INTERVAL):
        sim.step()
    assert len(sim.changes) == 1, "the first plan"
    assert sim.par() < 1.05
    for _ in range(50 * INTERVAL):
        sim.step()
    assert len(sim.changes) == 1
    assert sim.par() < 1.05
    decisions = sim.rebalancer.history.entries()
    assert {e.trigger for e in decisions if e.transit == 0} <= {"interval"}
    assert len(decisions) >= 50


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flip_is_followed_within_two_intervals(seed: int) -> None:
    """At any point of an interval."""
    sim = Sim(seed)
    for _ in range(3 * INTERVAL):
        sim.step()
    for wait in (0, 3, 7):
        for _ in range(4 * INTERVAL + wait):
            sim.step()
        while sim.par() < 1.2:
            sim.flip()
        for _ in range(2 * INTERVAL):
            sim.step()
        assert sim.par() < 1.1, "followed"


def test_the_load_is_followed_while_a_server_is_dead() -> None:
    """A dead server keeps its experts during its grace, and no other server loads them."""
    sim = Sim(0, redundancy=2)
    for _ in range(3 * INTERVAL):
        sim.step()
    sim.world.die("s3")
    sim.world.settle()
    before = sim.world.published
    s3 = before.servers.index("s3")
    for _ in range(INTERVAL):
        sim.step()
    assert sim.world.published.epoch > before.epoch
    assert sim.par() < 1.1
    while sim.par() < 1.2:
        sim.flip()
    followed = sim.world.published.epoch
    for _ in range(GRACE_STEPS - INTERVAL):
        sim.step()
    placement = sim.world.published
    assert placement.epoch > followed
    assert sim.par() < 1.1
    assert (placement.holds_LSE[:, placement.servers.index("s3")] == before.holds_LSE[:, s3]).all()
    assert (placement.holds_LSE.sum(axis=1) >= 2).all()
    sim.world.start("s3")
    sim.world.settle()
    for _ in range(2 * INTERVAL):
        sim.step()
    assert len(sim.world.up()) == 3
    assert sim.par() < 1.1, "with all of them"


def test_an_operator_may_rebalance_while_a_server_is_dead() -> None:
    sim = Sim(1, redundancy=2)
    for _ in range(3):
        sim.step()
    sim.world.die("s2")
    sim.world.settle()
    before = sim.world.published
    planned, stages = sim.rebalancer.rebalance("", force=False)
    assert planned.situation.servers == ("s1", "s3")
    assert planned.applicable
    assert stages == 1
    sim.world.wait(0.0)
    sim.world.settle()
    assert sim.world.published.epoch > before.epoch
    assert set(sim.world.published.servers) == {*NAMES}
    assert sim.par() == pytest.approx(planned.proposal.par_then_L.mean(), rel=0.05)


def test_without_a_living_server_there_is_no_plan() -> None:
    sim = Sim(2, redundancy=1)
    for _ in range(3):
        sim.step()
    now = PlannerSnapshot.of(sim.world.planner)
    with pytest.raises(NotNowError, match="no server of the placement lives"):
        sim.rebalancer.plan(sim.rebalancer.settings, replace(now, servers={}))

"""The monitor's failure detector over many seeded schedules, in simulated time.

A failing schedule names its seed: SIM_SEED=<seed> runs that one alone, with the identical trace. SIM_SEEDS is
the number of schedules of each kind.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.membership.cluster_view import RETURN_GRACE_S
from membership_sim import HEARTBEAT_S, LEASE_S, Plan, Process, Simulation

pytestmark = pytest.mark.timeout(600)

SEEDS = (
    [int(os.environ["SIM_SEED"])]
    if "SIM_SEED" in os.environ
    else range(int(os.environ.get("SIM_SEEDS", "250")))
)
ONE = len(SEEDS) == 1
ROOT = Path(__file__).parents[2]
PACKAGES = (
    "eaas",
    "eaas_cli",
    "frontend",
    "attention_client",
    "expert_server",
    "monitor",
    "balancer",
)
# A tick is due when a lease ends, but not more often than that.
TICK_S = 0.006
W_S = LEASE_S + TICK_S
W2_S = 2 * LEASE_S + TICK_S
# Heartbeats that a member's estimate needs, with the registration.
LEARNED = 17
LEARNED_S = LEARNED * 1.1
# Within this time the cut is over for all members: the self-isolation check must then hold.
CALM_S = 0.05


def each(draw: Callable[[random.Random], Plan], check: Callable[[Simulation], None]) -> None:
    """Run and check each seed's schedule; a failure names its seed."""
    for seed in SEEDS:
        simulation = Simulation(seed, draw(random.Random(seed)))
        try:
            check(simulation.run())
        except AssertionError as error:
            told = "\n".join(simulation.trace[-30:])
            raise AssertionError(f"SIM_SEED={seed}: {error}\n{simulation.plan}\n{told}") from error


def seen_within(simulation: Simulation, process: Process, bound_s: float) -> bool:
    """Whether a killed process was noticed in time, not counting the monitor's pauses."""
    since = max(
        [process.heard_at, *(end for _, end in simulation.plan.pauses if end > process.heard_at)]
    )
    if process.dead_at is not None:
        return process.dead_at - since <= bound_s
    return process.replaced or since + bound_s > simulation.plan.seconds


def killed(simulation: Simulation) -> list[Process]:
    return [p for p in simulation.processes if p.killed_at is not None]


def dies_alone(simulation: Simulation, process: Process) -> bool:
    """Whether no other process died within two leases."""
    assert process.killed_at is not None
    near = [p for p in killed(simulation) if abs(p.killed_at - process.killed_at) < W2_S]
    return near == [process]


def kills(
    dice: random.Random, members: int, seconds: float
) -> tuple[tuple[float, int, float], ...]:
    """Kills at random times, each with a restart."""
    drawn, free_from = [], [0.0] * members
    for _ in range(dice.randint(0, 4)):
        who, at = dice.randrange(members), dice.uniform(1.0, seconds)
        if at >= free_from[who]:
            free_from[who] = at + dice.uniform(0.01, 8.0)
            drawn.append((at, who, free_from[who] - 0.005))
    return tuple(drawn)


# -- jitter ----------------------------------------------------------------------------------------


def with_jitter(dice: random.Random) -> Plan:
    members, seconds = dice.randint(1, 6), 40.0
    jitter_s = dice.choice([0.0, CALM_S, dice.uniform(0, LEASE_S / 2), LEASE_S / 2])
    return Plan(members, seconds, jitter_s, kills=kills(dice, members, seconds))


def test_jitter_of_half_a_lease_causes_and_hides_no_death() -> None:
    """No false DEAD (`Simulation` checks each), every real death within W, no flapping once learned."""
    deaths = false_suspicions = 0

    def check(simulation: Simulation) -> None:
        nonlocal deaths, false_suspicions
        for process in killed(simulation):
            # Two of three are most: another test covers such deaths.
            bound_s = W_S if dies_alone(simulation, process) else W2_S
            assert seen_within(simulation, process, bound_s), f"{process} was not found out"
            deaths += process.dead_at is not None
        for process in simulation.processes:
            early = [beats for beats in process.suspected if beats < LEARNED]
            assert len(process.suspected) - len(early) <= (process.killed_at is not None), process
            false_suspicions += len(early)

    each(with_jitter, check)
    assert deaths >= len(SEEDS) // 2
    # While a member is new, at most every second heartbeat is later than the first patience.
    assert false_suspicions < LEARNED * len(SEEDS)


# -- pauses, cuts, deaths together -----------------------------------------------------------------


def with_pauses(dice: random.Random) -> Plan:
    members, seconds = dice.randint(1, 6), 40.0
    pauses, free_from = [], 0.0
    for _ in range(dice.randint(1, 4)):
        begin = dice.uniform(free_from, free_from + 10.0)
        # A pause too short for the monitor to notice is jitter, so there is no other jitter.
        free_from = begin + dice.choice([dice.uniform(0, 1.0), dice.uniform(1.0, 12.0)])
        pauses.append((begin, free_from))
    jitter_s = CALM_S if any(end - begin <= 1.3 for begin, end in pauses) else LEASE_S / 2
    return Plan(members, seconds, jitter_s, kills(dice, members, seconds), pauses=tuple(pauses))


def test_row_10_a_paused_monitor_declares_no_healthy_member_dead() -> None:
    """Row 10: monitor paused 10 s: on waking it declares no healthy member dead."""

    def check(simulation: Simulation) -> None:
        for process in killed(simulation):
            assert seen_within(simulation, process, W2_S), f"{process} was not found out"

    each(with_pauses, check)


def with_cuts_of_one(dice: random.Random) -> Plan:
    members, seconds = dice.randint(3, 6), 40.0
    begin = dice.uniform(LEARNED_S, 30.0)
    end = begin + dice.uniform(0.1, 8.0)
    return Plan(
        members, seconds, CALM_S, cuts=((begin, end, frozenset({dice.randrange(members)})),)
    )


def test_a_cut_off_member_does_not_affect_others() -> None:
    """It becomes SUSPECT, DEAD after a lease of silence, and returns as a new incarnation after the cut."""

    def check(simulation: Simulation) -> None:
        ((begin, end, who),) = simulation.plan.cuts
        (index,) = who
        for process in simulation.processes:
            if process.index != index:
                assert not process.suspected
        incarnations = [p for p in simulation.processes if p.index == index]
        assert len(incarnations) <= 2
        if end - begin > LEASE_S:
            assert incarnations[0].dead_at is not None
            assert incarnations[0].dead_at - incarnations[0].heard_at <= W_S
            assert incarnations[-1].dead_at is None
            assert len(incarnations) == 2 or end + LEASE_S > simulation.plan.seconds
        assert sum(len(p.suspected) for p in incarnations) <= 1, "one cut, one suspicion"

    each(with_cuts_of_one, check)


def with_a_cut_of_all(dice: random.Random) -> Plan:
    members = dice.randint(3, 8)
    begin = dice.uniform(LEARNED_S, 28.0)
    end = begin + dice.choice([dice.uniform(0.5, LEASE_S), dice.uniform(LEASE_S, 8.0)])
    return Plan(members, 40.0, CALM_S, cuts=((begin, end, frozenset(range(members))),))


def test_an_isolated_monitor_declares_no_member_dead_for_a_lease() -> None:
    """If the cut lasts, all members are DEAD two leases after their last heartbeat; then all return."""
    suspicions = 0

    def check(simulation: Simulation) -> None:
        nonlocal suspicions
        ((begin, end, who),) = simulation.plan.cuts
        for process in simulation.processes:
            suspicions += len(process.suspected)
            assert len(process.suspected) <= 1
            if end - begin <= LEASE_S:
                assert process.dead_at is None, process
            elif process.heard_at < begin + CALM_S and end - process.heard_at > W2_S:
                assert process.dead_at is not None
                assert process.dead_at - process.heard_at <= W2_S
        assert {p.index for p in simulation.processes if p.dead_at is None} == who

    each(with_a_cut_of_all, check)
    assert suspicions or ONE


def with_deaths_together(dice: random.Random) -> Plan:
    members, seconds = dice.randint(3, 8), 40.0
    # Most of them, at once or one after another.
    dying = dice.sample(range(members), dice.randint(members // 2 + 1, members))
    at, spread_s = dice.uniform(1.0, 30.0), dice.choice([0.01, 1.0, 4.0])
    jitter_s = dice.choice([0.0, CALM_S, dice.uniform(0, LEASE_S / 2)])
    moments = ((at + dice.uniform(0, spread_s), index, float("inf")) for index in dying)
    return Plan(members, seconds, jitter_s, kills=tuple(moments))


def test_many_deaths_at_once_are_noticed_within_two_leases() -> None:
    held = 0

    def check(simulation: Simulation) -> None:
        nonlocal held
        for process in killed(simulation):
            assert seen_within(simulation, process, W2_S), f"{process} was not found out"
            held += process.dead_at is not None and process.dead_at - process.heard_at > W_S

    each(with_deaths_together, check)
    assert held or ONE


def with_restarts(dice: random.Random) -> Plan:
    members, seconds = dice.randint(1, 6), 60.0
    downs, free_from = [], 0.0
    for _ in range(dice.randint(1, 2)):
        begin = dice.uniform(free_from + 1.0, free_from + 12.0)
        end = begin + dice.choice([dice.uniform(0.05, 1.0), dice.uniform(1.0, 12.0)])
        downs.append((begin, end))
        free_from = end + RETURN_GRACE_S + W2_S
    return Plan(members, seconds, CALM_S, kills(dice, members, seconds), downs=tuple(downs))


def test_row_9_a_monitor_that_was_down_is_back_and_nobody_flaps() -> None:
    """Row 9: monitor down: ... no flapping when it is back. Deaths during that time are noticed."""
    deaths = 0

    def check(simulation: Simulation) -> None:
        nonlocal deaths
        for process in simulation.processes:
            if process.killed_at is None:
                assert process.dead_at is None
                assert not process.suspected, process
                continue
            ups = [up_at for _, up_at in simulation.plan.downs if up_at > process.heard_at]
            since = max([process.heard_at, *ups])
            bound_s = RETURN_GRACE_S + W_S if ups else W2_S
            if process.dead_at is not None:
                deaths += bool(ups)
                assert process.dead_at - since <= bound_s, process
            else:
                assert process.replaced or since + bound_s > simulation.plan.seconds, process
        alive = [p for p in simulation.processes if p.alive]
        assert len(alive) == len({p.index for p in alive}), "no second incarnation without a death"

    each(with_restarts, check)
    assert deaths or ONE


# -- of any schedule -------------------------------------------------------------------------------

PLANS = (
    with_jitter,
    with_pauses,
    with_cuts_of_one,
    with_a_cut_of_all,
    with_deaths_together,
    with_restarts,
)


@pytest.mark.parametrize("draw", PLANS)
def test_a_seed_replays_its_trace(draw: Callable[[random.Random], Plan]) -> None:
    for seed in range(5):
        first, second = (Simulation(seed, draw(random.Random(seed))).run() for _ in range(2))
        assert first.trace == second.trace
        assert len(first.trace) > first.plan.members


def test_a_simulation_finds_a_detector_that_is_too_quick() -> None:
    """A lease shorter than an interval kills healthy members, and the simulation notices."""
    plan = Plan(members=3, seconds=10.0, jitter_s=LEASE_S / 2)
    simulation = Simulation(1, plan)
    simulation.registry = type(simulation.registry)(HEARTBEAT_S + 0.1, HEARTBEAT_S, 0.0)
    with pytest.raises(AssertionError):
        simulation.run()


def test_row_27_the_wall_clock_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 27: wall clock moves by an hour: no effect: only monotonic time decides."""
    plain = [Simulation(seed, with_jitter(random.Random(seed))).run().trace for seed in range(20)]
    hours = itertools.count()

    def jumping() -> float:
        return 1.8e9 + random.choice([-1, 1]) * 3600.0 * next(hours)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    moved = [Simulation(seed, with_jitter(random.Random(seed))).run().trace for seed in range(20)]
    assert moved == plain


def test_row_27_nothing_that_decides_reads_the_wall_clock() -> None:
    """Row 27: wall clock moves by an hour: no effect: only monotonic time decides. By what the code reads."""
    wall = re.compile(
        r"\btime\.(time|time_ns|ctime|localtime|gmtime)\b|\bdatetime\b|from time import .*\btime\b"
        r"|gettimeofday|CLOCK_REALTIME|\btime\(NULL\)"
    )
    read = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in (".py", ".c", ".h") and "rpc" not in path.parts
        for line in path.read_text().splitlines()
        if wall.search(line)
    ]
    # Times for people: of an answer and of the model (OpenAI's API), and of a decision. Also dates of
    # certificates, and spans.
    for_people = (
        "balancer/live/history.py: wall_clock: Callable[[], float] = time.time,",
        "eaas/telemetry/spans.py: self._of.processor.on_end(EndedChild(self._of, self, time.time_ns()))",
        "eaas/telemetry/spans.py: self.start_ns = time.time_ns()",
        "eaas_cli/certificates.py: from datetime import UTC, datetime, timedelta",
        "eaas_cli/certificates.py: if certificate.not_valid_after_utc < datetime.now(UTC):",
        "eaas_cli/certificates.py: now = datetime.now(UTC)",
        "eaas_cli/commands/placement.py: at = time.strftime(",
        "frontend/requests/generation.py: self.created = int(time.time())",
        "frontend/requests/service.py: self._created = int(time.time())",
    )
    for line, allowed in zip(sorted(read), for_people, strict=True):
        assert line.startswith(allowed)

"""When to plan, and with which knobs: at intervals, after a drift, by signals, and not for noise."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.live.triggers import Triggers, total_variation
from balancer.live.tuning import CONFIRM, Control, LinkMeter, Signals, burstiness, knobs_for

part = st.floats(0, 1)
maybe = st.none() | st.floats(0, 3)
signals = st.builds(Signals, st.floats(0, 3), st.none() | part, maybe)


def run(seen: list[Signals], *, spare_slots: bool = True) -> list[Mapping[str, float]]:
    control = Control()
    return [control.step(signal, spare_slots=spare_slots)[0] for signal in seen]


def changes(found: list[Mapping[str, float]]) -> int:
    return sum(a != b for a, b in pairwise(found))


@given(st.lists(signals, min_size=1), st.booleans())
def test_knobs_stay_in_their_bounds(seen: list[Signals], spare_slots: bool) -> None:
    for knobs in run(seen, spare_slots=spare_slots):
        assert 0 <= knobs["k"] <= (2 if spare_slots else 0)
        assert 1 <= knobs["budget"] <= 10
        assert 0.05 <= knobs["drift_tol"] <= 0.4
        assert 0.25 <= knobs["heavy_frac"] <= 0.75


@given(signals, signals)
def test_each_knob_is_monotone_in_its_signal(one: Signals, other: Signals) -> None:
    few, many = (knobs_for(s, spare_slots=True) for s in (one, other))
    assert (one.burstiness <= other.burstiness) <= (few["k"] <= many["k"])
    if one.link_load is not None and other.link_load is not None:
        assert (one.link_load <= other.link_load) <= (few["budget"] >= many["budget"])
    if one.latency is not None and other.latency is not None:
        for knob in ("drift_tol", "heavy_frac"):
            assert (one.latency <= other.latency) <= (few[knob] >= many[knob])


def test_from_end_to_end() -> None:
    calm, wild = Signals(0.0, 0.0, 0.2), Signals(1.0, 1.0, 2.0)
    names = ("k", "budget", "drift_tol", "heavy_frac")
    for signal, values in (
        (calm, (0.0, 10, 0.4, 0.75)),
        (wild, (2.0, 1, 0.05, 0.25)),
        (Signals(0.0), (0.0, 8, 0.2, 0.5)),
    ):
        assert knobs_for(signal, spare_slots=True) == dict(zip(names, values, strict=True))
    assert knobs_for(wild, spare_slots=False)["k"] == 0, "there is no replica to spare"


@given(signals, st.lists(part, min_size=1))
def test_signals_within_the_band_change_no_knob(first: Signals, noise: list[float]) -> None:
    def near(value: float | None, width: float, by: float) -> float | None:
        return None if value is None else value + width * (by - 0.5)

    seen = [first]
    for by in noise:
        seen.append(
            Signals(
                max(0.0, first.burstiness + 0.05 * (by - 0.5)),
                near(first.link_load, 0.19, by),
                near(first.latency, 0.19, by),
            )
        )
    assert not changes(run(seen))


@given(signals, signals, st.integers(1, 10))
def test_oscillating_signals_change_no_knob(one: Signals, other: Signals, times: int) -> None:
    """Three observations in a row are needed."""
    both = [
        s if None not in (s.link_load, s.latency) else Signals(s.burstiness, 0.1, 0.1)
        for s in (one, other)
    ]
    found = run([both[0], *[*[both[1]] * (CONFIRM - 1), both[0]] * times])
    assert not changes(found)


def test_a_lasting_change_takes_effect_once_with_a_reason() -> None:
    control = Control()
    _, why = control.step(Signals(0.1, 0.1, None), spare_slots=True)
    assert [w.split(" ")[0] for w in why] == ["the", "links"]
    for look in range(1, 3 * CONFIRM):
        knobs, why = control.step(Signals(0.1, 0.9, None), spare_slots=True)
        assert knobs["budget"] == (1 if look >= CONFIRM else 10)
        assert why == (("links are 90% full, after 0.10",) if look == CONFIRM else ())


@pytest.mark.parametrize("cv", [0.0, 0.1, 0.3, 0.6])
def test_burstiness_is_what_the_load_was_made_with(cv: float) -> None:
    """For any sample size, with drifting popularity."""
    rng = np.random.default_rng(1)
    steps, layers, experts = 400, 2, 32
    drift_W = np.linspace(0, 1, steps)[:, None, None]
    one_LE, other_LE = rng.dirichlet(np.full(experts, 0.7), (2, layers))
    part_WLE = (1 - drift_W) * one_LE + drift_W * other_LE
    if cv:
        part_WLE = part_WLE * rng.gamma(cv**-2, cv**2, part_WLE.shape)
    part_WLE /= part_WLE.sum(axis=2, keepdims=True)
    assert burstiness(0 * part_WLE.astype(np.int64)) == 0.0, "without tokens nothing is bursty"
    assert burstiness(np.ones((1, 2, 4), np.int64)) == 0.0
    for tokens in (300, 30_000):
        window_WLE = np.array(
            [[rng.multinomial(tokens, p) for p in part_LE] for part_LE in part_WLE]
        )
        # Parts sum to 1: what one has more, others have less.
        assert burstiness(window_WLE) == pytest.approx(0.9 * cv, abs=0.05 + 0.1 * cv)


def test_the_busiest_direction_of_the_busiest_machine() -> None:
    meter = LinkMeter()
    assert meter.read({"a": (0, 0), "b": (100, 100)}, 10.0) is None
    assert meter.read({"a": (20, 60), "b": (140, 100)}, 12.0) == 30.0
    assert meter.read({"b": (150, 160)}, 14.0) == 30.0
    assert meter.read({"a": (1000, 1000), "b": (0, 0)}, 16.0) is None, "machines that are new"
    assert meter.read({"a": (1000, 1000), "b": (0, 0)}, 18.0) == 0.0


L, E, S = 4, 16, 4


def load(rng: np.random.Generator, part_LE: np.ndarray, tokens: int = 4000) -> np.ndarray:
    return np.stack([rng.multinomial(tokens, p_E) for p_E in part_LE]).astype(float)


def distribution(seed: int) -> np.ndarray:
    part_LE = np.random.default_rng(seed).lognormal(0, 1, (L, E))
    return part_LE / part_LE.sum(axis=1, keepdims=True)


def test_stationary_traffic_is_no_drift() -> None:
    rng, part_LE = np.random.default_rng(2), distribution(1)
    triggers = Triggers(10_000, 20)
    triggers.planned(load(rng, part_LE), 1.05)
    for tokens in (30, 300, 3000):
        for _ in range(300):
            assert triggers.stepped(load(rng, part_LE, tokens), 1.1, S) is None


def test_another_load_is_drift_at_once() -> None:
    rng = np.random.default_rng(3)
    triggers = Triggers(100, 80)
    triggers.planned(load(rng, distribution(1)), 1.05)
    for _ in range(triggers.recent - 1):
        assert triggers.stepped(load(rng, distribution(2)), 1.1, S) is None
    trigger, why = triggers.stepped(load(rng, distribution(2)), 1.1, S) or ("", "")
    assert trigger == "drift"
    assert "total variation" in why


def test_a_rise_of_the_par_is_drift() -> None:
    """A server became slow; the load is unchanged."""
    rng, part_LE = np.random.default_rng(4), distribution(1)
    triggers = Triggers(100, 80)
    triggers.planned(load(rng, part_LE), 1.05)
    told = [triggers.stepped(load(rng, part_LE), 1.5, S) for _ in range(triggers.recent)]
    assert told[-1] is not None
    assert told[-1][0] == "drift"
    assert told[-1][1].startswith("PAR 1.50, 1.05")


def test_total_variation() -> None:
    one = np.array([[1.0, 0.0], [2.0, 2.0]])
    assert total_variation(one, 10 * one) == 0
    assert total_variation(one, one[:, ::-1]) == pytest.approx(0.5)
    assert total_variation(one, np.zeros((2, 2))) == 0

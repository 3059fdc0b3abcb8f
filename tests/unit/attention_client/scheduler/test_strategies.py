"""The contract of all strategies, and each strategy against a slow form of its rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.scheduler import strategy, strategy_names
from attention_client.scheduler.strategies import Context, PowerOfD, PowerOfDDot
from eaas.errors import ConfigError
from installed_package import install


def select(
    name: str, window_WE: np.ndarray, batch_size: int, running_E: np.ndarray | None = None
) -> list[int]:
    rng = np.random.default_rng(0)
    return strategy(name).select(window_WE, batch_size, rng, Context(running_E)).tolist()


@st.composite
def windows(draw: st.DrawFn, most: int = 20) -> np.ndarray:
    """Whole tokens, so that sums are exact in any order."""
    requests, experts = draw(st.integers(1, most)), draw(st.integers(1, 13))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.integers(0, draw(st.sampled_from((1, 3, 50))) + 1, (requests, experts)).astype(float)


def greedily(window_WE: np.ndarray, batch_size: int, start_E: np.ndarray, score) -> list[int]:
    """The greedy rule, step by step: the least score joins; of equals the older."""
    chosen, load_E = [0], start_E + window_WE[0]
    while len(chosen) < min(len(window_WE), batch_size):
        left = [w for w in range(len(window_WE)) if w not in chosen]
        best = min(left, key=lambda w: score(load_E, window_WE[w]))
        chosen.append(best)
        load_E = load_E + window_WE[best]
    return chosen


@pytest.mark.parametrize("name", strategy_names())
@given(windows(), st.integers(1, 9))
def test_the_contract(name: str, window_WE: np.ndarray, batch_size: int) -> None:
    given_WE = window_WE.copy()
    chosen = select(name, window_WE, batch_size)
    assert (
        select(name, window_WE, batch_size) == chosen
    )  # pure: randomness from the generator alone
    assert len(chosen) == len(set(chosen)) == min(len(window_WE), batch_size)
    assert 0 in chosen
    assert set(chosen) <= set(range(len(window_WE)))
    np.testing.assert_array_equal(window_WE, given_WE)


SCORES = {
    # Exact in whole numbers: E^2 Var, |L + v|^2, v.L.
    "greedy_variance": lambda load, v: len(v) * ((load + v) @ (load + v)) - (load + v).sum() ** 2,
    "norm_minimizing": lambda load, v: (load + v) @ (load + v),
    "greedy_dot_product": lambda load, v: load @ v,
    "lpt_balanced": lambda load, v: ((load + v).max(), -v.max()),
}


@pytest.mark.parametrize("name", SCORES)
@given(windows(), st.integers(1, 9), st.booleans())
def test_greedy_rules(name: str, window_WE: np.ndarray, batch_size: int, running: bool) -> None:
    # Variance is compared in floating point: a power of two of experts keeps it exact.
    if name == "greedy_variance":
        window_WE = np.ascontiguousarray(np.resize(window_WE, (len(window_WE), 8)))
    start_E = np.arange(window_WE.shape[1], dtype=float) if running else None
    wanted = greedily(
        window_WE,
        batch_size,
        np.zeros(window_WE.shape[1]) if start_E is None else start_E,
        SCORES[name],
    )
    assert select(name, window_WE, batch_size, start_E) == wanted


def test_best_fit_comes_nearest_to_an_even_load() -> None:
    rng = np.random.default_rng(5)
    window_WE = rng.integers(0, 90, (16, 8)).astype(float)
    level = 4 * window_WE.mean()
    wanted = greedily(window_WE, 4, np.zeros(8), lambda load, v: ((load + v - level) ** 2).sum())
    assert select("best_fit", window_WE, 4) == wanted


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_with_equal_totals_three_objectives_agree(seed: int, batch_size: int) -> None:
    rng = np.random.default_rng(seed)
    window_WE = rng.multinomial(400, rng.dirichlet(np.ones(16)), size=24).astype(float)
    answers = [
        select(name, window_WE, batch_size)
        for name in ("greedy_variance", "norm_minimizing", "best_fit")
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("sampled", "full"), [(PowerOfD, "greedy_variance"), (PowerOfDDot, "greedy_dot_product")]
)
@given(windows())
def test_power_of_all_is_greedy(sampled, full: str, window_WE: np.ndarray) -> None:
    every = sampled()
    every.d = len(window_WE)
    chosen = every.select(window_WE, 5, np.random.default_rng(1), Context())
    assert chosen.tolist() == select(full, window_WE, 5)


def test_power_of_d_considers_only_d_candidates() -> None:
    """With one draw per step, every request is chosen about equally often."""
    window_WE = np.tile(np.arange(10.0)[:, None], (1, 4))
    rng = np.random.default_rng(3)
    seen, of_one = np.zeros(10), PowerOfD()
    of_one.d = 1
    for _ in range(4000):
        seen[of_one.select(window_WE, 4, rng, Context())] += 1
    assert seen[0] == 4000
    assert np.all(np.abs(seen[1:] / 4000 - 1 / 3) < 0.04)


@given(windows(), st.integers(1, 6))
def test_lpt_takes_the_highest_peaks(window_WE: np.ndarray, batch_size: int) -> None:
    chosen = select("lpt", window_WE, batch_size)
    left = set(range(len(window_WE))) - set(chosen)
    peak_W = window_WE.max(axis=1)
    assert all(peak_W[a] >= peak_W[b] for a in chosen[1:] for b in left)


def slow_split(sizes_WE: np.ndarray, groups: int) -> list[list[int]]:
    """The balanced largest differencing method over lists of members."""
    order = sorted(range(len(sizes_WE)), key=lambda w: (-(sizes_WE[w] @ sizes_WE[w]), w))
    splits = [
        [([w], sizes_WE[w]) for w in order[at : at + groups]] for at in range(0, len(order), groups)
    ]

    def differs(split) -> float:
        sums = np.array([load for _, load in split])
        return float((sums.max(axis=0) - sums.min(axis=0)).sum())

    while len(splits) > 1:
        ranked = sorted(range(len(splits)), key=lambda p: (-differs(splits[p]), p))
        low, high = sorted(ranked[:2])
        one, other = splits[low], list(splits[high])
        joined: dict[int, tuple[list[int], np.ndarray]] = {}
        for g in sorted(range(groups), key=lambda g: (-(one[g][1] @ one[g][1]), g)):
            # The place in `other` says which of equals is first, so it is kept.
            free = [h for h in range(groups) if other[h] is not None]
            best = min(free, key=lambda h: (one[g][1] @ other[h][1], h))
            joined[g] = (one[g][0] + other[best][0], one[g][1] + other[best][1])
            other[best] = None
        splits[low] = [joined[g] for g in range(groups)]
        splits[high] = splits[-1]
        splits.pop()
    return [members for members, _ in splits[0]]


@given(windows(24), st.integers(1, 6))
def test_differencing_equals_the_slow_method(window_WE: np.ndarray, batch_size: int) -> None:
    groups = len(window_WE) // batch_size
    if groups < 2:
        return
    used_WE = window_WE[: groups * batch_size]
    mine = next(group for group in slow_split(used_WE, groups) if 0 in group)
    assert sorted(select("differencing", window_WE, batch_size)) == sorted(mine)
    peaks = used_WE.max(axis=1, keepdims=True)
    mine = next(group for group in slow_split(peaks, groups) if 0 in group)
    assert sorted(select("karmarkar_karp", window_WE, batch_size)) == sorted(mine)


def test_an_unknown_strategy_error_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'gredy'.*greedy_variance"):
        strategy("gredy")


def test_a_former_strategy_names_its_successor() -> None:
    with pytest.raises(ConfigError, match=r"'cost_bounded' is gone: 'greedy_variance'"):
        strategy("cost_bounded")


OTHERS = """
import numpy as np
from attention_client.scheduler import SelectionStrategy

class Youngest(SelectionStrategy):
    name = "youngest"

    def select(self, window_WE, batch_size, rng, context):
        size = min(len(window_WE), batch_size)
        return np.r_[0, np.arange(len(window_WE) - size + 1, len(window_WE))]

class Stranger: pass
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with entry points of the group."""
    given = {"youngest": "Youngest", "stranger": "Stranger", "gone": "Gone", "fcfs": "Stranger"}
    install(tmp_path, monkeypatch, "eaas.strategies", "other_scheduler", given, OTHERS)


@pytest.mark.usefixtures("other_package")
def test_another_package_adds_a_strategy() -> None:
    assert strategy_names()[-3:] == ("gone", "stranger", "youngest")
    assert select("youngest", np.ones((6, 2)), 3) == [0, 4, 5]
    for name in ("stranger", "gone"):
        with pytest.raises(ConfigError, match=name):
            strategy(name)
    assert select("fcfs", np.ones((6, 2)), 2) == [0, 1]  # built-in names win

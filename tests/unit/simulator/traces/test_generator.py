"""Synthetic traces: reproducible, and true to their regimes, also to those of topics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.errors import ConfigError
from simulator.traces import REGIMES, generate_trace
from simulator.traces.generator import popularity
from simulator.traces.published import published
from simulator.traces.topics import BLOCK, topics_of_streams
from simulator.traces.trace import summary

SMALL: dict[str, Any] = {"iterations": 96, "layers": 4, "experts": 64, "tokens": 512}


@pytest.mark.parametrize("regime", REGIMES)
def test_the_same_seed_gives_the_same_trace(regime: str) -> None:
    one, again, other = (generate_trace(regime, **SMALL, seed=seed) for seed in (3, 3, 4))
    assert one.counts_ILE.shape == (96, 4, 64)
    assert np.array_equal(one.counts_ILE, again.counts_ILE)
    assert not np.array_equal(one.counts_ILE, other.counts_ILE)
    per_layer = one.counts_ILE.sum(axis=2)
    assert per_layer.mean() == pytest.approx(512 * 8, rel=0.02)
    assert per_layer.std() < 0.1 * 512 * 8


def test_regimes_are_what_they_are_called() -> None:
    found = {regime: summary(generate_trace(regime, **SMALL)) for regime in REGIMES}
    change = {regime: values["change"] for regime, values in found.items()}
    assert change["skewed"] < 0.05
    assert change["uniform"] < 0.05
    assert change["drift"] > 4 * change["skewed"]
    assert change["flips"] > 4 * change["skewed"]
    hottest = {regime: values["hottest_mean"] for regime, values in found.items()}
    assert hottest["uniform"] < 1.5 < hottest["skewed"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"regime": "wild"}, "skewed, drift, flips, uniform"),
        ({"iterations": 0}, "iterations 0"),
        ({"layers": -1}, "layers -1"),
        ({"tokens": 0}, "tokens 0"),
        ({"top_k": 65}, "top-k 65"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        generate_trace(**{"regime": "skewed", **SMALL, **arguments})


def test_published_figures() -> None:
    assert {regime.dataset for regime in REGIMES.values()} == {None, "LmSys", "Mix"}
    figures = {(f.servers, f.interval): (f.par, f.transit) for f in published("LmSys")}
    assert figures[32, None] == (1.6302, 0)
    assert figures[256, 1024] == (2.1768, 146927)
    assert len(figures) == len(published("Mix")) == 24
    with pytest.raises(ConfigError, match="LmSys, WildChat, ShareGPT, Mix"):
        published("lmsys")


def test_noise_is_what_the_regime_says() -> None:
    quiet = replace(REGIMES["uniform"], sigma=0.0, noise=0.0)
    loud = replace(quiet, noise=0.3)
    for regime, variation in ((quiet, 0.0), (loud, 0.3)):
        counts = generate_trace(
            regime, iterations=2000, layers=1, experts=32, tokens=400
        ).counts_ILE
        # Counting adds its own: the mean is 100.
        expected = np.sqrt(variation**2 + 1 / 100)
        assert counts.std() / counts.mean() == pytest.approx(expected, rel=0.02)


BURSTY, CORRELATED = REGIMES["bursty_topics"], REGIMES["correlated_layers"]


def shares_BLE(regime: Any, blocks: int, layers: int, experts: int, seed: int = 0) -> Any:
    """True popularity in each block of the generated trace with this seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(2)[0])
    at = popularity(regime, blocks * BLOCK, layers, experts, rng)
    return np.stack([at(block * BLOCK) for block in range(blocks)])


def correlation(series_BN: Any) -> Any:
    """(N, N): correlation of columns over time."""
    return np.corrcoef(series_BN.T)


@given(
    name=st.sampled_from(["bursty_topics", "correlated_layers"]),
    iterations=st.integers(1, 100),
    layers=st.integers(1, 4),
    experts=st.integers(1, 40),
    tokens=st.integers(1, 500),
    seed=st.integers(0, 2**32),
    period=st.integers(1, 200),
    topics=st.integers(1, 8),
    width=st.integers(1, 50),
)
def test_popularity_sums_to_one_and_counts_to_the_tokens(
    name: str,
    iterations: int,
    layers: int,
    experts: int,
    tokens: int,
    seed: int,
    period: int,
    topics: int,
    width: int,
) -> None:
    regime = replace(
        REGIMES[name], period=period, topics=topics, streams=width, group=width, noise=0.0
    )
    sizes: Any = {"layers": layers, "experts": experts}
    made = generate_trace(
        regime, iterations=iterations, tokens=tokens, top_k=1, seed=seed, **sizes
    ).counts_ILE
    assert made.shape == (iterations, layers, experts)
    again = generate_trace(
        regime, iterations=iterations, tokens=tokens, top_k=1, seed=seed, **sizes
    ).counts_ILE
    assert np.array_equal(made, again)
    shares = shares_BLE(regime, -(-iterations // BLOCK), layers, experts, seed)
    assert (shares > 0).all()
    np.testing.assert_allclose(shares.sum(axis=2), 1.0)
    # Poisson: a layer's sum has the variance of its mean. Seven deviations.
    pairs = tokens * layers * iterations
    assert abs(int(made.sum(dtype=np.int64)) - pairs) <= 7 * np.sqrt(pairs) + 7


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), streams=st.integers(1, 6), topics=st.integers(2, 12))
def test_bursts_are_never_shorter_than_the_shortest(seed: int, streams: int, topics: int) -> None:
    regime = replace(BURSTY, streams=streams, topics=topics, period=3 * BLOCK)
    topic_MB = topics_of_streams(regime, 400, np.random.default_rng(seed))
    assert topic_MB.shape == (streams, 400)
    assert 0 <= topic_MB.min() <= topic_MB.max() < topics
    for topic_B in topic_MB:
        starts = np.flatnonzero(np.diff(topic_B)) + 1
        # The first and the last burst are cut off by the trace.
        assert (np.diff(starts) >= 3).all()


def test_bursts_have_a_heavy_tail_and_topics_are_unequal() -> None:
    regime = replace(BURSTY, period=BLOCK)
    topic_MB = topics_of_streams(regime, 60_000, np.random.default_rng(0))
    lengths = np.concatenate([np.diff(np.flatnonzero(np.diff(topic_B))) for topic_B in topic_MB])
    # ceil(U**(-1/1.5)) > n has the probability n**-1.5; an exponential tail would have 1e-7 at 40.
    for longer in (2, 8, 40):
        assert (lengths > longer).mean() == pytest.approx(longer**-1.5, rel=0.15)
    times_J = np.bincount(topic_MB.ravel(), minlength=regime.topics)
    assert times_J[0] > 2 * times_J[regime.topics // 2] > 0


def test_experts_of_a_group_are_hot_together() -> None:
    # Equal layers: with unequal ones only the size of the moves would differ.
    regime = replace(CORRELATED, spread=0.0)
    experts = 8 * regime.group
    log_BE = np.log(shares_BLE(regime, 256, 1, experts))[:, 0]
    together_EE = correlation(log_BE)
    # Popularity is relative: all experts share the denominator. Only members move in step exactly.
    mates_EE = together_EE > 1 - 1e-9
    assert (mates_EE.sum(axis=1) == regime.group).all()
    assert not mates_EE[0, : regime.group].all(), "groups are not the experts' order"
    assert np.abs(together_EE[~mates_EE]).mean() < 0.6

    counts = generate_trace(regime, iterations=4096, layers=1, experts=experts).counts_ILE
    load_BE = counts[:, 0].reshape(-1, BLOCK, experts).sum(axis=1, dtype=float)
    seen_EE = correlation(load_BE)
    np.fill_diagonal(mates_EE, val=False)
    assert seen_EE[mates_EE].mean() > seen_EE[~mates_EE].mean() + 0.5


def test_adjacent_layers_are_correlated_and_distant_ones_less() -> None:
    regime = replace(CORRELATED, spread=0.0)
    layers, blocks = 40, 3000
    shares = shares_BLE(regime, blocks, layers, 4 * regime.group)
    # How uneven a layer is over time; which experts are hot does not matter.
    peak_BL = shares.max(axis=2)
    near = np.mean([np.corrcoef(peak_BL[:, i], peak_BL[:, i + 1])[0, 1] for i in range(39)])
    assert near > 0.3

    def cross(apart: int) -> float:
        """Mean over experts of the best correlation with an expert `apart` layers later."""
        log_BLE = np.log(shares)
        found = []
        for layer in range(0, layers - apart, 5):
            both = np.hstack([log_BLE[:, layer], log_BLE[:, layer + apart]])
            half = both.shape[1] // 2
            found.append(correlation(both)[:half, half:].max(axis=1).mean())
        return float(np.mean(found))

    assert cross(1) > 0.8
    assert cross(1) > cross(4) > cross(30)

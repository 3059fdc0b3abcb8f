"""Synthetic traces: reproducible, and true to their regimes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eaas.errors import ConfigError
from simulator.traces import REGIMES, generate_trace
from simulator.traces.published import published
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

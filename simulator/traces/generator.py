"""Generates synthetic routing traces: a regime's popularity of experts over time, plus batches' noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from eaas.errors import ConfigError
from simulator.traces.regimes import REGIMES, Regime
from simulator.traces.topics import BLOCK, bursty_topics, correlated_layers
from simulator.traces.trace import Trace, checked_counts

__all__ = ["generate_trace", "popularity"]

Float = npt.NDArray[np.float64]

_FLIP_SETS = 3
_OF_TOPICS = {"bursty_topics": bursty_topics, "correlated_layers": correlated_layers}


def generate_trace(
    regime: str | Regime,
    *,
    iterations: int = 6144,
    layers: int = 58,
    experts: int = 256,
    tokens: int = 1024,
    top_k: int = 8,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _part: None,
) -> Trace:
    """Generate a synthetic routing trace. The same arguments give the same trace.

    Args:
        regime: A name in `REGIMES`, or a regime of your own.
        iterations: I.
        layers: L.
        experts: E.
        top_k: Experts of each token; the counts of a layer sum to about tokens * top_k (within the noise).
        seed: Seed of the random numbers.
        progress: Called with the part done, 0 to 1.

    Raises:
        ConfigError: An unknown regime, or a number below 1; the message names it.

    Time O(I * L * E), about 0.1 us for each count.
    """
    if isinstance(regime, str):
        if regime not in REGIMES:
            raise ConfigError(f"regime {regime}: give one of {', '.join(REGIMES)}")
        regime = REGIMES[regime]
    sizes = {
        "iterations": iterations,
        "layers": layers,
        "experts": experts,
        "tokens": tokens,
        "top-k": top_k,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} {value}: give at least 1")
    if top_k > experts:
        raise ConfigError(f"top-k {top_k}: give at most the {experts} experts")
    shape_rng, batch_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    shares = popularity(regime, iterations, layers, experts, shape_rng)
    counts = np.empty((iterations, layers, experts), np.uint32)
    for begin in range(0, iterations, BLOCK):
        end = min(begin + BLOCK, iterations)
        mean_LE = tokens * top_k * shares(begin)
        shape = (end - begin, layers, experts)
        if regime.noise:
            factor = batch_rng.standard_gamma(regime.noise**-2, shape) * regime.noise**2
            counts[begin:end] = batch_rng.poisson(mean_LE * factor)
        else:
            counts[begin:end] = batch_rng.poisson(mean_LE, shape)
        progress(end / iterations)
    notes = {"regime": asdict(regime), "tokens": tokens, "top_k": top_k, "seed": seed}
    return Trace(checked_counts(counts, "the generator"), notes)


def popularity(
    regime: Regime, iterations: int, layers: int, experts: int, rng: np.random.Generator
) -> Callable[[int], Float]:
    """Return a function from iteration to experts' true shares of a layer's tokens, (L, E), before noise."""
    lift_L = np.exp(regime.spread * rng.standard_normal(layers) - regime.spread**2 / 2)
    sigma_L1 = regime.sigma * lift_L[:, None]
    if regime.change in _OF_TOPICS:
        blocks = math.ceil(iterations / BLOCK)
        at_block = _OF_TOPICS[regime.change](regime, blocks, sigma_L1, experts, rng)
        return lambda iteration: at_block(iteration // BLOCK)
    period = max(1, min(regime.period, math.ceil(iterations / _FLIP_SETS)))
    changes = iterations // period + 2 if regime.change == "drift" else _FLIP_SETS
    vectors = rng.standard_normal((changes if regime.change != "none" else 1, layers, experts))

    def shares(iteration: int) -> Float:
        step, part = divmod(iteration / period, 1.0)
        if regime.change == "none":
            z_LE = vectors[0]
        elif regime.change == "flips":
            z_LE = vectors[int(step) % _FLIP_SETS]
        else:
            # A rotation keeps the variance: cos^2 + sin^2 = 1.
            angle = part * math.pi / 2
            z_LE = math.cos(angle) * vectors[int(step)] + math.sin(angle) * vectors[int(step) + 1]
        powers = np.exp(sigma_L1 * z_LE)
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    return shares

"""Popularity of experts that latent topics drive: which experts are hot together, and for how long.

At any time log popularity has the standard deviation sigma_l among the experts of layer l, as in the other
regimes. What differs is what moves together.

bursty_topics. Topic j = 1..J has its own popularity, p_jl = softmax(sigma_l * z_jl), z_jl standard normal per
expert. A batch holds M streams of requests; stream m has one topic for a burst, and then takes another:

    popularity of layer l at t = 1/M * sum over m of p_jl, where j is the topic of stream m at t
    P(burst longer than n blocks) = (shortest / n)**1.5        (Pareto: the variance is infinite)
    P(next topic is j)            ~ 1 / rank(j)                (Zipf)

So the covariance of experts over time has rank J - 1, and is the same process in all layers.

correlated_layers. The experts of a layer form groups of G, at random in each layer. F factors x_f(t), each of
mean 0 and variance 1, move all groups of all layers:

    log popularity of expert e at t = sigma_l * (sqrt(1 - c) * z_le + sqrt(c) * a_lq . x(t)) + constant
    a_lq = unit vector along 0.9 * a_(l-1)q + sqrt(1 - 0.9**2) * g / sqrt(F),     g standard normal
    x_f(t + 1 block) = r * x_f(t) + sqrt(1 - r**2) * g,     r = exp(-block / period)

with c = 0.6 and q the group of e in layer l. So a group's experts move together over time (z stays), and
group q of layer l and group q of layer l + n have a correlation that falls about as 0.9**n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from simulator.traces.regimes import Regime

__all__ = ["BLOCK", "bursty_topics", "correlated_layers", "topics_of_streams"]

Float = npt.NDArray[np.float64]

# Popularity is constant over this many iterations.
BLOCK = 16

_TAIL = 1.5
# Part of the variance of log popularity that a group's experts share, and correlation of adjacent layers.
_SHARED, _NEXT_LAYER = 0.6, 0.9


def bursty_topics(
    regime: Regime, blocks: int, sigma_L1: Float, experts: int, rng: np.random.Generator
) -> Callable[[int], Float]:
    """Return a function from block to popularity, (L, E), each layer's sum 1.

    Args:
        regime: Its `topics` (J), `streams` (M), and `period`: the shortest burst, in iterations.
        blocks: Number of blocks of the trace.
        sigma_L1: (L, 1): standard deviation of log popularity.
        experts: E.
    """
    powers_JLE = np.exp(sigma_L1 * rng.standard_normal((regime.topics, len(sigma_L1), experts)))
    powers_JLE /= powers_JLE.sum(axis=2, keepdims=True)
    topic_MB = topics_of_streams(regime, blocks, rng)

    def shares(block: int) -> Float:
        return np.asarray(powers_JLE[topic_MB[:, block]].mean(axis=0))

    return shares


def topics_of_streams(
    regime: Regime, blocks: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return each stream's topic in each block, (M, B): bursts of Pareto length, topics by Zipf's law."""
    weight_J = 1.0 / np.arange(1, regime.topics + 1)
    shortest = max(regime.period / BLOCK, 1.0)
    topic_MB = np.empty((regime.streams, blocks), np.int64)
    for topic_B in topic_MB:
        # The middle of a first burst: the streams must not all switch near the start.
        at, topic = -int(rng.integers(0, round(2 * shortest))), -1
        while at < blocks:
            # A new burst has a new topic, if there is another.
            other_J = np.where(np.arange(regime.topics) == topic, 0.0, weight_J)
            if other_J.any():
                topic = int(rng.choice(regime.topics, p=other_J / other_J.sum()))
            # Capped by the trace, since a Pareto number may exceed any integer.
            length = int(np.ceil(min(shortest * (1.0 - rng.random()) ** (-1 / _TAIL), blocks)))
            topic_B[max(at, 0) : max(at + length, 0)] = topic
            at += length
    return topic_MB


def correlated_layers(
    regime: Regime, blocks: int, sigma_L1: Float, experts: int, rng: np.random.Generator
) -> Callable[[int], Float]:
    """Return a function from block to popularity, (L, E), each layer's sum 1.

    Args:
        regime: Its `topics` (F), `group` (G), and `period`: iterations after which a factor's correlation
            with itself is 1/e.
        blocks: Number of blocks of the trace.
        sigma_L1: (L, 1): standard deviation of log popularity.
        experts: E.
    """
    layers, groups = len(sigma_L1), -(-experts // regime.group)
    own_LE = rng.standard_normal((layers, experts))
    group_LE = np.stack([rng.permutation(experts) // regime.group for _ in range(layers)])
    along_LQF = np.empty((layers, groups, regime.topics))
    for layer in range(layers):
        step_QF = rng.standard_normal((groups, regime.topics)) / np.sqrt(regime.topics)
        if layer:
            step_QF = _NEXT_LAYER * along_LQF[layer - 1] + np.sqrt(1 - _NEXT_LAYER**2) * step_QF
        along_LQF[layer] = step_QF / np.linalg.norm(step_QF, axis=1, keepdims=True)
    keep = np.exp(-BLOCK / regime.period)
    factor_BF = rng.standard_normal((blocks, regime.topics))
    for block in range(1, blocks):
        factor_BF[block] = keep * factor_BF[block - 1] + np.sqrt(1 - keep**2) * factor_BF[block]

    def shares(block: int) -> Float:
        common_LE = np.take_along_axis(along_LQF @ factor_BF[block], group_LE, axis=1)
        powers_LE = np.exp(
            sigma_L1 * (np.sqrt(1 - _SHARED) * own_LE + np.sqrt(_SHARED) * common_LE)
        )
        return np.asarray(powers_LE / powers_LE.sum(axis=1, keepdims=True))

    return shares

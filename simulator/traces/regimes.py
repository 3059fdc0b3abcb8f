"""Named regimes of expert popularity for synthetic traces, two of them fitted to figures of a real model.

The popularity of the experts of layer l is softmax(sigma_l * z), z standard normal per expert: log-normal.
sigma_l = sigma * exp(spread * n - spread**2 / 2), n standard normal per layer: some layers are skewed, some
hardly (see CRAFT, section 3.2). A batch adds noise: a gamma factor of mean 1 on each expert, and counting
(Poisson). z changes over time:

    stationary   z stays
    drift        z rotates evenly from one random vector to the next, one every `period` iterations
    flips        z alternates between three vectors, every `period` iterations

Two more regimes have experts that are hot together; `topics` has their formulas:

    bursty_topics      a batch mixes the popularities of a few topics, which switch in heavy-tailed bursts
    correlated_layers  experts are hot in groups, and the same few factors drive all layers

`skewed` and `flips` were fitted by hand to the published figures of EPLB on DeepSeek-R1 routing (58 layers,
256 experts; see `published`), datasets LmSys and Mix; `eaas trace info FILE --against DATASET` measures a
trace's deviation. `drift` has the skew of `skewed` and a speed that is not fitted. `uniform` sketches models
trained to an even load. The two regimes of topics are not fitted either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["REGIMES", "Regime"]


@dataclass(frozen=True)
class Regime:
    """Parameters of a regime of expert popularity.

    Attributes:
        about: One-line description, for people.
        sigma: Standard deviation of log popularity in a typical layer.
        spread: Standard deviation of log sigma over layers.
        noise: Coefficient of variation of an expert's load between batches, without counting noise.
        change: How popularity changes over time; see the module.
        period: Iterations from one popularity to the next, at most a third of the trace (drift, flips);
            shortest burst (bursty_topics); correlation time (correlated_layers).
        dataset: The dataset of the published figures that it was fitted to.
        topics: Number of topics, or of factors.
        streams: bursty_topics: topics in a batch, with repeats.
        group: correlated_layers: experts that are hot together.
    """

    name: str
    about: str
    sigma: float
    spread: float
    noise: float
    change: Literal["none", "drift", "flips", "bursty_topics", "correlated_layers"] = "none"
    period: int = 0
    dataset: str | None = None
    topics: int = 0
    streams: int = 0
    group: int = 0


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("skewed", "stationary skew (as LmSys)", 0.57, 0.2, 0.125, dataset="LmSys"),
        Regime("drift", "the same skew, wandering slowly", 0.57, 0.2, 0.125, "drift", 2048),
        Regime("flips", "the skew changes at once (as Mix)", 0.76, 0.2, 0.16, "flips", 1700, "Mix"),
        Regime("uniform", "hardly any skew", 0.1, 0.2, 0.125),
        Regime(
            "bursty_topics",
            "batches of a few topics, which switch in heavy-tailed bursts",
            *(1.2, 0.2, 0.125, "bursty_topics", 32),
            topics=16,
            streams=4,
        ),
        Regime(
            "correlated_layers",
            "experts hot in groups, and layers together",
            *(1.3, 0.2, 0.125, "correlated_layers", 64),
            topics=6,
            group=16,
        ),
    )
}

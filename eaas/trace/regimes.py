"""Named regimes of expert popularity, and the figures of a real model that they were fitted to.

The popularity of the experts of layer l at a time is softmax(sigma_l * z), z standard normal per expert, so
popularity is log-normal; sigma_l = sigma * exp(spread * n - spread**2 / 2), n standard normal per layer:
some layers are skewed, some hardly (as CRAFT, section 3.2, finds). A batch adds noise: a gamma factor of
mean 1 on each expert, and counting (Poisson). What changes over time is z:

    stationary   z stays
    drift        z turns from one random vector to the next, one every `period` iterations, evenly
    flips        every `period` iterations z is replaced, in turn, by another of three

`skewed` and `flips` were fitted by hand to the published figures of EPLB on DeepSeek-R1 routing (58 layers,
256 experts; see `published`), datasets LmSys and Mix; `eaas trace info FILE --against DATASET` measures how
far off a trace is. `drift` has the skew of `skewed`; its speed was not fitted to anything. `uniform`, too,
is a sketch: of models that were trained to an even load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["REGIMES", "Regime"]


@dataclass(frozen=True)
class Regime:
    """How popularity is made.

    Attributes:
        name: What people call it.
        about: One line for them.
        sigma: Of log popularity, typical of a layer.
        spread: Of the logarithm of sigma over layers.
        noise: Coefficient of variation of an expert's load from batch to batch, beside counting.
        change: What happens over time.
        period: Iterations from one popularity to the next; at most a third of the trace.
        dataset: The published figures that it was fitted to.
    """

    name: str
    about: str
    sigma: float
    spread: float
    noise: float
    change: Literal["none", "drift", "flips"] = "none"
    period: int = 0
    dataset: str | None = None


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("skewed", "stationary skew (as LmSys)", 0.57, 0.2, 0.125, dataset="LmSys"),
        Regime("drift", "the same skew, wandering slowly", 0.57, 0.2, 0.125, "drift", 2048),
        Regime("flips", "the skew changes at once (as Mix)", 0.76, 0.2, 0.16, "flips", 1700, "Mix"),
        Regime("uniform", "hardly any skew", 0.1, 0.2, 0.125),
    )
}

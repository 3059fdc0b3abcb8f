"""What clients find while servers fail: experts without a replica or with one, and the servers' imbalance."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eaas.types import Placement

__all__ = ["Point", "Timeline", "point"]


@dataclass(frozen=True)
class Point:
    """The cluster from one change to the next.

    Attributes:
        at_s: Simulated seconds since the first failure.
        uncovered: Share of the experts (of all layers) that no live server holds.
        single: Share of the experts that exactly one live server holds.
        imbalance: Load of the busiest live server over the mean of the live ones, mean over the layers (PAR).
    """

    at_s: float
    uncovered: float
    single: float
    imbalance: float


@dataclass
class Timeline:
    """The points of one failure, in order."""

    points: list[Point] = field(default_factory=list)

    @property
    def uncovered(self) -> float:
        """Largest share of the experts without a live replica."""
        return max(p.uncovered for p in self.points)

    @property
    def single(self) -> float:
        """Largest share of the experts with one live replica."""
        return max(p.single for p in self.points)

    @property
    def imbalance(self) -> float:
        """Largest imbalance."""
        return max(p.imbalance for p in self.points)

    @property
    def whole_at_s(self) -> float | None:
        """Since when every expert has two live replicas until the end; None: it has not."""
        return self._since([bool(p.uncovered or p.single) for p in self.points])

    @property
    def covered_at_s(self) -> float | None:
        """Since when every expert has a live replica until the end; None: it has not."""
        return self._since([bool(p.uncovered) for p in self.points])

    def _since(self, broken: list[bool]) -> float | None:
        if broken[-1]:
            return None
        last = max((i for i, is_broken in enumerate(broken) if is_broken), default=-1)
        return self.points[last + 1].at_s if last >= 0 else 0.0


def point(
    at_s: float, placement: Placement, live: Collection[str], load_LE: npt.NDArray[np.float32]
) -> Point:
    """Measure a placement, of whose servers some live: clients split a lost replica's load over the others.

    Args:
        at_s: Simulated seconds.
        placement: What clients follow.
        live: Servers that answer, with all that the placement gives them.
        load_LE: Tokens of each expert.
    """
    live_S = np.array([s in live for s in placement.servers], np.bool_)
    holds_LSE = placement.holds_LSE & live_S[None, :, None]
    replicas_LE = holds_LSE.sum(axis=1)
    par = []
    for layer, holds_SE in enumerate(holds_LSE):
        share_SE = np.where(holds_SE, placement.shares_LSE[layer], np.float32(0))
        per_share_E = load_LE[layer] / np.maximum(share_SE.sum(axis=0), np.float32(1e-9))
        load_S = (share_SE @ np.where(replicas_LE[layer] > 0, per_share_E, 0))[live_S]
        par.append(float(load_S.max() / load_S.mean()) if load_S.any() else 1.0)
    return Point(
        at_s,
        float((replicas_LE == 0).mean()),
        float((replicas_LE == 1).mean()),
        float(np.mean(par)),
    )

"""What the knobs are set from: how bursty the load is, how full the links are. No I/O, no clock.

burstiness   by how much an expert's part of a layer's tokens jumps from step to step, as a part of it; the
             hot ones count most. What counting alone does to it is taken off, and what drifts is no burst
link load    the part of its link that the busiest server's machine uses, in its busier direction
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["LinkMeter", "burstiness"]

Traffic = tuple[int, int]


def burstiness(window_WLE: npt.NDArray[np.number]) -> float:
    """Coefficient of variation of the experts' parts from step to step, mean over layers; 0 or more.

    Half the mean square of successive differences is the variance of what does not drift (von Neumann,
    1941), whatever its mean does meanwhile. A sample of n tokens has p (1 - p) / n of it by itself.

    Args:
        window_WLE: Tokens by step, layer and expert. Steps of a layer without tokens are left out.
    """
    found = []
    for tokens_WE in window_WLE.swapaxes(0, 1):
        tokens_W = tokens_WE.sum(axis=1, dtype=np.float64)
        known_W = tokens_W > 0
        if known_W.sum() < 2:
            continue
        n_W = tokens_W[known_W]
        part_WE = tokens_WE[known_W] / n_W[:, None]
        mean_E = part_WE.mean(axis=0)
        variance = 0.5 * float((np.diff(part_WE, axis=0) ** 2).sum(axis=1).mean())
        chance = float((mean_E * (1 - mean_E)).sum() * (1 / n_W).mean())
        found.append(np.sqrt(max(0.0, variance - chance) / float(mean_E @ mean_E)))
    return float(np.mean(found)) if found else 0.0


class LinkMeter:
    """From what machines have carried since they began to the rate of the busiest one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Traffic]] = {}

    def read(self, carried: Mapping[str, Traffic], now: float) -> float | None:
        """Bytes per second since the last look; None where no server was heard twice.

        Args:
            carried: Bytes received and sent, by server, as their machines count them.
            now: Monotonic seconds.
        """
        rates = []
        for server, totals in carried.items():
            before_at, before = self._known.get(server, (now, totals))
            more = [new - old for new, old in zip(totals, before, strict=True)]
            # A counter that falls is another machine's: the server has moved.
            if now > before_at and min(more) >= 0:
                rates.append(max(more) / (now - before_at))
            self._known[server] = now, totals
        self._known = {s: known for s, known in self._known.items() if s in carried}
        return max(rates, default=None)

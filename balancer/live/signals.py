"""Inputs of the control loop: burstiness of the load, load of the links. No I/O, no clock.

burstiness   how much an expert's share of a layer's tokens jumps from step to step, relative to that share;
             hot experts weigh most. Counting noise is subtracted, and drift does not count as a burst
link load    use of the busiest server machine's link, in its busier direction
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["LinkMeter", "burstiness"]

Traffic = tuple[int, int]


def burstiness(window_WLE: npt.NDArray[np.number]) -> float:
    """Coefficient of variation of the experts' shares from step to step, mean over layers; 0 or more.

    Half the mean square of successive differences is the variance without drift (von Neumann, 1941). A
    sample of n tokens has a variance of p (1 - p) / n by itself.

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
        noise = float((mean_E * (1 - mean_E)).sum() * (1 / n_W).mean())
        found.append(np.sqrt(max(0.0, variance - noise) / float(mean_E @ mean_E)))
    return float(np.mean(found)) if found else 0.0


class LinkMeter:
    """Turns the machines' byte counters into the rate of the busiest machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Traffic]] = {}

    def read(self, carried: Mapping[str, Traffic], now: float) -> float | None:
        """Bytes per second since the last call; None if no server has reported twice.

        Args:
            carried: Bytes received and sent, by server, as its machine counts them.
            now: Monotonic seconds.
        """
        rates = []
        for server, totals in carried.items():
            before_at, before = self._known.get(server, (now, totals))
            more = [new - old for new, old in zip(totals, before, strict=True)]
            # A counter that falls belongs to another machine: the server has moved.
            if now > before_at and min(more) >= 0:
                rates.append(max(more) / (now - before_at))
            self._known[server] = now, totals
        self._known = {s: known for s, known in self._known.items() if s in carried}
        return max(rates, default=None)

"""Measures two inputs of ScalpeLB's control loop for `Tuning`: burstiness and link load. No I/O, no clock.

burstiness   change of an expert's share of a layer's tokens from step to step, relative to that share; hot
             experts weigh most. Counting noise is subtracted, and drift does not count as a burst
link load    use of the network link of the busiest server machine, in its busier direction
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["LinkMeter", "burstiness"]

Traffic = tuple[int, int]


def burstiness(window_WLE: npt.NDArray[np.number]) -> float:
    """Return the coefficient of variation of experts' shares from step to step, mean over layers; >= 0.

    Half the mean square of successive differences is the variance without drift (von Neumann, 1941). The
    sampling variance of n tokens, p (1 - p) / n, is subtracted.

    Args:
        window_WLE: Tokens by step, layer and expert. Steps in which a layer has no tokens are left out.
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
    """Turns the byte counters of expert servers' machines into the rate of the busiest machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Traffic]] = {}

    def read(self, carried: Mapping[str, Traffic], now: float) -> float | None:
        """Return the busiest server machine's bytes per second since the last call, for the link load.

        None if no server has reported twice.

        Args:
            carried: Total bytes received and sent by each server's machine, by server.
            now: Monotonic seconds.
        """
        rates = []
        for server, totals in carried.items():
            before_at, before = self._known.get(server, (now, totals))
            more = [new - old for new, old in zip(totals, before, strict=True)]
            # If a counter falls, the server has moved to another machine.
            if now > before_at and min(more) >= 0:
                rates.append(max(more) / (now - before_at))
            self._known[server] = now, totals
        self._known = {s: known for s, known in self._known.items() if s in carried}
        return max(rates, default=None)

"""For dashboard, `eaas top` and `eaas up`: how far servers are with loading experts. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eaas.types import Member

__all__ = ["Loading", "LoadingFold", "bytes_per_s"]

# Interval of the rate: an expert of a large model takes seconds.
_RATE_S = 30.0
# Two readings between the same heartbeats differ by rounding only.
_SAME_S = 0.2
_LONG_S = 120


@dataclass(frozen=True)
class Loading:
    """Progress of an expert server's load.

    Attributes:
        total_bytes: Bytes of the checkpoint that the load takes; above 0.
        loaded_bytes: How many of them are loaded.
        bytes_per_s: Rate of the last half minute; None if unknown.
    """

    total_bytes: int
    loaded_bytes: int
    bytes_per_s: float | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at this rate; None if the rate is unknown or 0."""
        if not self.bytes_per_s:
            return None
        return max(0, self.total_bytes - self.loaded_bytes) / self.bytes_per_s

    @property
    def text(self) -> str:
        """Format as "1.4 of 4.0 GB (35 %), 28.0 MB/s, 93 s left", for display."""
        size, name = _unit(self.total_bytes)
        percent = 100 * self.loaded_bytes / self.total_bytes
        loaded, total = self.loaded_bytes / size, self.total_bytes / size
        parts = [f"{loaded:,.1f} of {total:,.1f} {name} ({percent:.0f} %)"]
        if self.bytes_per_s is not None:
            size, name = _unit(self.bytes_per_s)
            parts.append(f"{self.bytes_per_s / size:,.1f} {name}/s")
        if (left_s := self.left_s) is not None:
            parts.append(f"{_time(left_s)} left")
        return ", ".join(parts)


def bytes_per_s(samples: Sequence[tuple[float, int]]) -> float | None:
    """Compute the rate between the first and the last sample, (seconds, bytes) each; None if too close."""
    if not samples:
        return None
    (began_at, before), (ended_at, after) = samples[0], samples[-1]
    return (after - before) / (ended_at - began_at) if ended_at - began_at >= _SAME_S else None


class LoadingFold:
    """Folds readings of the members into the progress of each expert server that loads experts."""

    def __init__(self) -> None:
        # By incarnation: the total, and (time of the heartbeat, bytes loaded) for the last half minute.
        self._known: dict[tuple[str, int], tuple[int, deque[tuple[float, int]]]] = {}

    def take(self, members: Iterable[Member], at: float) -> dict[str, Loading]:
        """Fold in the newest reading; return the progress by id, without servers that load nothing.

        Args:
            members: All members, with their current loads.
            at: Time of the reading in monotonic seconds.
        """
        known, found = {}, {}
        for member in members:
            total, loaded = member.loading_bytes, member.loaded_bytes
            if not total or member.state.is_gone:
                continue
            key = member.id, member.incarnation
            former, samples = self._known.get(key, (total, deque()))
            if former != total or (samples and loaded < samples[-1][1]):
                # Another load has begun.
                samples = deque()
            heard_at = at - member.silence_s
            if not samples or heard_at - samples[-1][0] >= _SAME_S:
                samples.append((heard_at, loaded))
            while len(samples) > 2 and samples[1][0] <= heard_at - _RATE_S:
                samples.popleft()
            known[key] = total, samples
            found[member.id] = Loading(total, loaded, bytes_per_s(samples))
        self._known = known
        return found


def _unit(count: float) -> tuple[float, str]:
    return (1e9, "GB") if count >= 1e9 else (1e6, "MB")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _LONG_S else f"{seconds / 60:.0f} min"

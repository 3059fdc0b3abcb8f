"""Computes the throughput that faults cost. Pure: rounds in, sums out.

Each fault has two adjacent rounds with the same work: one without it (quiet) and one with it (faulted). Their
difference is the cost of the fault.

Capacity. On one machine a dead server frees its processor time for the others. The lost capacity is the
processor time that the replacement takes to start and load, as a share of the machine's cores over the
faulted rounds. The loss beyond that is the cost of the failover: detection, repeated work, cold caches, the
control plane.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.failover.streams import Round

__all__ = ["Strike", "lost", "phases", "timeline"]


@dataclass(frozen=True)
class Strike:
    """A fault, with its two rounds. Times are monotonic seconds.

    Attributes:
        back_s: Time when every expert had all of its replicas again.
        replacement_cpu_s: Processor time of the replacement's start and load.
        quiet: The round without the fault.
        faulted: The round with the fault.
    """

    kind: str
    server: str
    at_s: float
    back_s: float
    replacement_cpu_s: float
    quiet: Round
    faulted: Round

    @property
    def wrong(self) -> int:
        """Number of streams whose text differs from the quiet round."""
        pairs = zip(self.quiet.answers, self.faulted.answers, strict=True)
        return sum(before.text != after.text for before, after in pairs)


def _rate(rounds: Sequence[Round]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def lost(strikes: Sequence[Strike], cores: int) -> dict[str, float]:
    """Compute the losses by faults, as shares of the throughput without faults.

    Returns:
        `tokens_per_s_quiet`, `tokens_per_s_faulted`; `gross`: the lost share; `gross_error`: its standard
        error over the faults; `capacity`: processor time of replacements, as a share of the machine;
        `beyond_capacity`: gross minus capacity; `seconds_per_fault`: gross, in seconds of quiet work.
    """
    quiet, faulted = _rate([s.quiet for s in strikes]), _rate([s.faulted for s in strikes])
    seconds = sum(s.faulted.seconds for s in strikes)
    gross = 1 - faulted / quiet
    singly = [1 - s.quiet.seconds / s.faulted.seconds for s in strikes]
    error = statistics.stdev(singly) / len(singly) ** 0.5 if len(singly) > 1 else 0.0
    capacity = sum(s.replacement_cpu_s for s in strikes) / (cores * seconds)
    return {
        "tokens_per_s_quiet": quiet,
        "tokens_per_s_faulted": faulted,
        "gross": gross,
        "gross_error": error,
        "capacity": capacity,
        "beyond_capacity": gross - capacity,
        "seconds_per_fault": gross * seconds / len(strikes),
    }


def phases(strikes: Sequence[Strike]) -> dict[str, float]:
    """Tokens per second of the faulted rounds: before the fault, until all replicas were back, after."""
    counts, seconds = (
        {"before": 0.0, "during": 0.0, "after": 0.0},
        dict.fromkeys(("before", "during", "after"), 0.0),
    )
    for strike in strikes:
        r = strike.faulted
        # Each piece of text counts as the mean number of tokens per piece.
        stamps = [stamp for answer in r.answers for stamp in answer.stamps_s]
        per_piece = r.tokens / max(1, len(stamps))
        back = min(strike.back_s, r.ended_s)
        edges = (r.began_s, strike.at_s, back, r.ended_s)
        for name, (begin, end) in zip(counts, itertools.pairwise(edges), strict=True):
            counts[name] += per_piece * sum(begin <= stamp < end for stamp in stamps)
            seconds[name] += end - begin
    return {name: counts[name] / seconds[name] if seconds[name] else 0.0 for name in counts}


def timeline(rounds: Sequence[Round], bin_s: float) -> list[tuple[float, float]]:
    """Compute (seconds since the first round's begin, tokens/s) for each bin, with rounds put end to end."""
    found: list[tuple[float, float]] = []
    offset = 0.0
    for r in rounds:
        stamps = [stamp - r.began_s for answer in r.answers for stamp in answer.stamps_s]
        per_piece = r.tokens / max(1, len(stamps))
        bins = max(1, round(r.seconds / bin_s))
        width = r.seconds / bins
        for i in range(bins):
            came = sum(i * width <= stamp < (i + 1) * width for stamp in stamps)
            found.append((offset + i * width, per_piece * came / width))
        offset += r.seconds
    return found

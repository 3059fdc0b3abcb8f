"""Simulates what autoscaling saves, compared with fixed groups; and the traffic of EaaS, section 5.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eaas.config import AutoscalerConfig
from simulator.autoscaling.replay import Outcome, run_autoscaled, run_fixed
from simulator.autoscaling.serving import ServerModel
from simulator.autoscaling.traffic import Traffic

__all__ = [
    "Comparison",
    "busiest_tokens_per_s",
    "compare",
    "paper_traffic",
    "tokens_per_s_at_target",
]

# A fixed group is sized by the highest mean demand over this many seconds.
_PEAK_S = 60.0
_PERCENTILE = 0.99

PAPER_SERVERS = 64
"""EaaS, section 5.3: GPUs that decode for 8,192 requests."""

_PAPER_BEFORE, _PAPER_AFTER = 8192, 5120


@dataclass(frozen=True)
class Comparison:
    """One traffic trace on an autoscaled group and on fixed groups.

    Attributes:
        fixed: Outcomes of the fixed groups, by size.
    """

    autoscaled: Outcome
    fixed: dict[int, Outcome]

    def saved(self, size: int) -> float:
        """Return the saved part of a fixed group's server-hours; below 0: the autoscaled group took more."""
        return 1 - self.autoscaled.server_hours / self.fixed[size].server_hours

    def saved_at_end(self, size: int) -> float:
        """Return the saved part of a fixed group's servers at the end of the trace; below 0: more run."""
        return 1 - self.autoscaled.last_servers / size

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of figures for each group, the autoscaled one first, as JSON values."""
        rows = [_row("autoscaled", self.autoscaled, None, None)]
        for size, outcome in self.fixed.items():
            rows.append(_row(f"fixed {size}", outcome, self.saved(size), self.saved_at_end(size)))
        return rows


def compare(
    traffic: Traffic,
    model: ServerModel,
    config: AutoscalerConfig,
    sizes: Sequence[int],
    *,
    start: int,
    fewest: int,
    change_s: float,
    progress: Callable[[float], None] = lambda share: None,
) -> Comparison:
    """Replay a trace on an autoscaled group and on a fixed group of each size (see `run_autoscaled`)."""
    runs = 1 + len(sizes)

    def part(done: int) -> Callable[[float], None]:
        return lambda share: progress((done + share) / runs)

    autoscaled = run_autoscaled(
        traffic, model, start, config, fewest=fewest, change_s=change_s, progress=part(0)
    )
    fixed = {
        size: run_fixed(traffic, model, size, config.interval_s, part(done))
        for done, size in enumerate(sizes, start=1)
    }
    return Comparison(autoscaled, fixed)


def busiest_tokens_per_s(traffic: Traffic, token_s: float, prompt_tokens: int) -> float:
    """Compute the tokens per second in a trace's busiest minute, if servers keep up: the demand to size for.

    Args:
        token_s: See `ServerModel`.
        prompt_tokens: See `ServerModel`.
    """
    prompt_R = traffic.prompt_R if prompt_tokens else np.zeros_like(traffic.prompt_R)
    prompted_R = traffic.arrival_s_R + token_s * prompt_R / max(1, prompt_tokens)
    begin = np.concatenate((traffic.arrival_s_R, prompted_R))
    end = np.concatenate((prompted_R, prompted_R + token_s * traffic.output_R))
    some = end > begin
    if not some.any():
        return 0.0
    begin, end = begin[some], end[some]
    tokens = np.concatenate((prompt_R, traffic.output_R))[some]
    # Each part has a constant rate, so the cumulative demand is linear between the ends of parts.
    at = np.concatenate((begin, end))
    order = np.argsort(at, kind="stable")
    at = at[order]
    rate = np.cumsum(np.concatenate((tokens / (end - begin), -tokens / (end - begin)))[order])
    asked = np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(at))))
    edges = np.arange(0.0, traffic.span_s + _PEAK_S, _PEAK_S)
    return float(np.diff(np.interp(edges, at, asked, left=0.0)).max() / _PEAK_S)


def tokens_per_s_at_target(asked: float, servers: int, config: AutoscalerConfig) -> float:
    """Compute the throughput of a server at which `servers` of them meet a demand at target utilisation.

    The model's servers have it by default, so that the largest fixed group is just large enough.
    """
    return asked / (servers * config.target_utilization)


def paper_traffic(token_s: float, before_s: float, after_s: float) -> Traffic:
    """Make the traffic of EaaS, section 5.3: 8,192 requests that generate all the time, then 5,120.

    Args:
        token_s: Seconds between two tokens of a request.
        before_s: Length of the first part.
        after_s: Length of the second part.
    """
    lasting = round((before_s + after_s) / token_s) + 1
    output_R = np.full(_PAPER_BEFORE, lasting)
    output_R[_PAPER_AFTER:] = round(before_s / token_s)
    return Traffic(
        f"{_PAPER_BEFORE:,} requests, then {_PAPER_AFTER:,}",
        np.zeros(_PAPER_BEFORE),
        np.zeros(_PAPER_BEFORE, dtype=np.int64),
        output_R,
        before_s + after_s,
    )


def _row(
    name: str, outcome: Outcome, saved: float | None, saved_at_end: float | None
) -> dict[str, Any]:
    load = outcome.load
    return {
        "group": name,
        "servers": {
            "fewest": outcome.fewest_servers,
            "most": outcome.most_servers,
            "last": outcome.last_servers,
        },
        "changes": len(outcome.servers) - 1,
        "server_hours": outcome.server_hours,
        "saved_by_autoscaling": saved,
        "saved_at_end": saved_at_end,
        "utilization": load.utilization,
        "token_ms": 1000 * (load.token_s or 0.0),
        "token_ms_p99": 1000 * outcome.token_s(_PERCENTILE),
        "slowed_tokens": load.slowed / load.outputs if load.outputs else 0.0,
        "unfinished_requests": outcome.unfinished,
    }

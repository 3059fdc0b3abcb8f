"""Simulates what autoscaling saves, compared with fixed groups; and the traffic of EaaS, section 5.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eaas.config import AutoscalerConfig
from eaas.errors import ConfigError, TrafficError
from simulator.autoscaling.replay import Outcome, run
from simulator.autoscaling.serving import ServerModel
from simulator.autoscaling.traffic import Traffic

__all__ = [
    "PAPER_SERVERS",
    "Study",
    "busiest_tokens_per_s",
    "paper_traffic",
    "study",
]

# A fixed group is sized by the highest mean demand over this many seconds.
_PEAK_S = 60.0
_PERCENTILE = 0.99

PAPER_SERVERS = 64
"""EaaS, section 5.3: GPUs that decode for 8,192 requests."""

_PAPER_BEFORE, _PAPER_AFTER = 8192, 5120


@dataclass(frozen=True)
class Study:
    """One traffic trace on an autoscaled group and on fixed groups.

    Attributes:
        asked: Tokens per second in the busiest minute.
        fixed: Outcomes of the fixed groups, by size.
    """

    traffic: Traffic
    model: ServerModel
    config: AutoscalerConfig
    asked: float
    autoscaled: Outcome
    fixed: dict[int, Outcome]

    def document(self) -> dict[str, Any]:
        """Return the figures as JSON values; the first of `groups` is the autoscaled one."""
        rows = [_row("autoscaled", self.autoscaled, None, None)]
        for size, outcome in self.fixed.items():
            # Below 0: the autoscaled group took more.
            saved = 1 - self.autoscaled.server_hours / outcome.server_hours
            rows.append(_row(f"fixed {size}", outcome, saved, 1 - self.autoscaled.sizes[-1] / size))
        return {
            "trace": {
                "name": self.traffic.name,
                "requests": self.traffic.requests,
                "seconds": self.traffic.span_s,
                "busiest_minute_tokens_per_s": self.asked,
            },
            "server": {
                "tokens_per_s": self.model.tokens_per_s,
                "token_ms": 1000 * self.model.token_s,
                "prompt_tokens": self.model.prompt_tokens,
            },
            "autoscaler": self.config.model_dump(),
            "groups": rows,
            "servers_over_time": self.autoscaled.servers,
        }


def study(
    traffic: Traffic,
    config: AutoscalerConfig,
    sizes: Sequence[int],
    *,
    start: int,
    fewest: int,
    change_s: float,
    token_s: float,
    prompt_tokens: int,
    tokens_per_s: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Study:
    """Replay a trace on an autoscaled group and on a fixed group of each size.

    Args:
        start, fewest, change_s: See `run`; `start` servers are at the start of the autoscaled group.
        token_s, prompt_tokens: See `ServerModel`.
        tokens_per_s: See `ServerModel`. None: the throughput at which the largest fixed group meets the
            busiest minute at target utilisation, so that it is just large enough.
        progress: Called with the part done, 0 to 1.

    Raises:
        ConfigError: min_servers is above max_servers.
        TrafficError: No request asks these servers for a token.
    """
    if config.min_servers > config.max_servers:
        raise ConfigError(
            f"autoscaler: min_servers {config.min_servers} is above max_servers {config.max_servers}"
        )
    asked = busiest_tokens_per_s(traffic, token_s, prompt_tokens)
    if not asked:
        raise TrafficError(f"{traffic.name}: no request asks these servers for a token")
    if tokens_per_s is None:
        tokens_per_s = asked / (max(sizes) * config.target_utilization)
    model = ServerModel(tokens_per_s, token_s, prompt_tokens)

    def replayed(servers: int, done: int, *, autoscaled: bool) -> Outcome:
        return run(
            traffic,
            model,
            servers,
            config,
            autoscaled=autoscaled,
            fewest=fewest,
            change_s=change_s,
            progress=lambda share: progress((done + share) / (1 + len(sizes))),
        )

    first = replayed(start, 0, autoscaled=True)
    fixed = {
        size: replayed(size, done, autoscaled=False) for done, size in enumerate(sizes, start=1)
    }
    return Study(traffic, model, config, asked, first, fixed)


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
            "fewest": min(outcome.sizes),
            "most": max(outcome.sizes),
            "last": outcome.sizes[-1],
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

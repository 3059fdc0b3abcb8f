"""For dashboard and `eaas top`: parses an HTTP endpoint's counters from its /metrics page. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["COUNTED", "Counters", "Rates", "rates", "read_counters"]

_LINE = re.compile(r"([\w:]+)(?:\{([^}]*)\})? ([^ ]+)")
_REASON = re.compile(r'reason="([^"]*)"')
# Metric -> field of `Counters`. Both engines export these names; with vLLM there are no others.
_TOTALS = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:time_to_first_token_seconds_sum": "ttft_s",
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "vllm:inter_token_latency_seconds_sum": "itl_s",
    "vllm:inter_token_latency_seconds_count": "later_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
# Metric with a label `reason` -> field. Failovers of an endpoint over engines, and over vLLM.
_BY_REASON = {
    "eaas_engine_failovers_total": "failovers",
    "eaas_failovers_total": "failovers",
    "eaas_frontend_migrations_total": "migrations",
}

COUNTED = (*_TOTALS, *_BY_REASON)
"""Names of the Prometheus metrics that are parsed."""


@dataclass(frozen=True)
class Counters:
    """Totals since the HTTP endpoint's start; `running` and `waiting` are current values.

    Attributes:
        tokens: Generated tokens.
        ttft_s: Seconds to first tokens, summed over `first_tokens` requests.
        itl_s: Seconds between tokens, summed over `later_tokens` tokens.
        running: Requests in the batch.
        waiting: Requests in the queue.
        failovers: Parts of layer calls sent to another replica, by reason.
        migrations: Requests that left an attention client before their end, by reason.
    """

    tokens: float = 0.0
    ttft_s: float = 0.0
    first_tokens: float = 0.0
    itl_s: float = 0.0
    later_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    failovers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    migrations: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Rates:
    """Rates of an endpoint over an interval; None if there was nothing to measure.

    Attributes:
        tokens_per_s: Generated tokens; None before a second reading.
        ttft_s: Mean seconds to a request's first token.
        itl_s: Mean seconds between two tokens of a request.
    """

    tokens_per_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


def read_counters(text: str) -> Counters:
    """Parse an endpoint's counters from Prometheus' text format; missing counters are 0."""
    totals: dict[str, float] = {}
    reasons: dict[str, dict[str, float]] = {"failovers": {}, "migrations": {}}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        if name in _TOTALS:
            totals[_TOTALS[name]] = totals.get(_TOTALS[name], 0.0) + float(value)
        elif name in _BY_REASON and (reason := _REASON.search(labels or "")):
            counts = reasons[_BY_REASON[name]]
            counts[reason[1]] = counts.get(reason[1], 0.0) + float(value)
    failovers, migrations = (MappingProxyType(found) for found in reasons.values())
    return Counters(**totals, failovers=failovers, migrations=migrations)


def rates(before: Counters, after: Counters, seconds: float) -> Rates:
    """Compute the rates between two readings of an endpoint, `seconds` apart; none after its restart."""
    if seconds <= 0 or after.tokens < before.tokens:
        return Rates()
    firsts = after.first_tokens - before.first_tokens
    later = after.later_tokens - before.later_tokens
    return Rates(
        (after.tokens - before.tokens) / seconds,
        (after.ttft_s - before.ttft_s) / firsts if firsts > 0 else None,
        (after.itl_s - before.itl_s) / later if later > 0 else None,
    )

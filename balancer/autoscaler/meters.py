"""What the autoscaler and live knobs measure: rates between two readings of processes' totals. No clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import sub
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eaas.log import get_logger
from eaas.types import Member, MemberState, Role

__all__ = ["LatencyMeter", "Totals", "Utilizations", "token_times"]

_log = get_logger(__name__)
_METRICS_S = 2.0
# Both engines export this name.
_TOKEN_TIME = "vllm:inter_token_latency_seconds"

# A batch counts when it ends and may have begun before the last reading, so a share may exceed 1. A higher
# share than this means that the stored total was outdated.
_PLAUSIBLE = 1.5

_Incarnation = tuple[str, int]


class Utilizations:
    """Computes the utilisation of each expert server between two readings of the autoscaler."""

    def __init__(self) -> None:
        # Time of the report, and busy seconds.
        self._known: dict[_Incarnation, tuple[float, float]] = {}

    def read(self, servers: Iterable[Member], now: float) -> dict[str, float]:
        """Return utilisations, 0 to 1, by id, of servers that have reported twice; others are unmeasured.

        Args:
            servers: With their current `busy_s` and `silence_s`.
            now: Monotonic seconds.
        """
        shares, known = {}, {}
        for m in servers:
            incarnation = (m.id, m.incarnation)
            said_at = now - m.silence_s
            known[incarnation] = (said_at, m.busy_s)
            before_at, before_s = self._known.get(incarnation, (said_at, m.busy_s))
            if m.busy_s < before_s:
                # A restarted monitor has not received a report from the server yet.
                known[incarnation] = (before_at, before_s)
            elif said_at > before_at:
                share = (m.busy_s - before_s) / (said_at - before_at)
                if share <= _PLAUSIBLE:
                    shares[m.id] = min(1.0, share)
        self._known = known
        return shares


class Totals:
    """Takes the differences of running totals between two readings, by key."""

    def __init__(self) -> None:
        self._known: Mapping[Any, tuple[float, ...]] = {}

    def since_last(self, now: Mapping[Any, tuple[float, ...]]) -> list[tuple[float, ...]]:
        """Return what was added to the totals of each key that the last reading had, too."""
        before, self._known = self._known, dict(now)
        return [tuple(map(sub, now[key], before[key])) for key in now.keys() & before.keys()]


class LatencyMeter:
    """Computes the mean time between two tokens of a request, over all clients, between two readings."""

    def __init__(self) -> None:
        self._totals = Totals()

    def read(self, counted: Mapping[_Incarnation, tuple[float, float]]) -> float | None:
        """Return the mean seconds between two tokens since the last reading; None: no tokens.

        Args:
            counted: Sum (seconds) and number of the times since the client's start, by (id, incarnation) of
                each client that answered.
        """
        more = self._totals.since_last(counted)
        tokens = sum(count for _, count in more)
        return sum(seconds for seconds, _ in more) / tokens if tokens > 0 else None


def token_times(members: Iterable[Member]) -> Mapping[tuple[str, int], tuple[float, float]]:
    """Read sum and number of the times between tokens, by (id, incarnation) of each client that answers."""
    times = {}
    for m in members:
        if (
            m.role is not Role.ATTENTION_CLIENT
            or m.state is not MemberState.SERVING
            or not m.address
        ):
            continue
        try:
            # Members are called directly, not through a proxy set in the environment.
            response = httpx.get(
                f"http://{m.address}/metrics", timeout=_METRICS_S, trust_env=False
            ).raise_for_status()
            times[m.id, m.incarnation] = _token_time(response.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            _log.warning("cannot read the /metrics of %s: %s", m.id, error)
    return times


def _token_time(text: str) -> tuple[float, float]:
    """Parse sum and count of the token-time histogram in a Prometheus page. Raises ValueError without one."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name == _TOKEN_TIME:
            # vLLM has a histogram for each of its engines.
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    try:
        return values[f"{_TOKEN_TIME}_sum"], values[f"{_TOKEN_TIME}_count"]
    except KeyError as error:
        raise ValueError(f"no {error.args[0]} in it") from error

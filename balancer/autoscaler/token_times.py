"""Reads the time between two tokens from clients' /metrics, for autoscaler and balancer (live knobs)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eaas.log import get_logger
from eaas.types import Member, MemberState, Role

__all__ = ["token_times"]

_log = get_logger(__name__)
_METRICS_S = 2.0
# Both engines export this name.
_TOKEN_TIME = "vllm:inter_token_latency_seconds"


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

"""The autoscaler at a running cluster: where its readings come from, and who is told of its decisions.

    monitor: members, how busy each server was ----+
    endpoints, /metrics: time between two tokens --+--> Autoscaler --> balancer: Scale --> who starts servers
    balancer: how few servers there may be --------+

It is no member, and keeps nothing that anybody needs: it may end and start again at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from balancer.autoscaler.core import Autoscaler, Reading
from balancer.autoscaler.meters import LatencyMeter, Utilizations
from eaas.balancer_calls import scale_servers
from eaas.config import AutoscalerConfig
from eaas.errors import ClusterError, ConfigError
from eaas.grpc_client import channel
from eaas.log import get_logger
from eaas.monitors import Monitors, ask_members
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, MemberState, Role

__all__ = ["LiveAutoscaler"]

_log = get_logger(__name__)

_CALL_S = 5.0
_METRICS_S = 2.0
_TOKEN_TIME = "eaas_inter_token_latency_seconds"
_GONE = (MemberState.DEAD, MemberState.DRAINING)
_COMING_OR_GOING = (MemberState.JOINING, MemberState.DRAINING)


class LiveAutoscaler:
    """Looks at a cluster, decides, and has it done.

    Args:
        config: The autoscaler's settings.
        monitor_address: host:port of the monitor; "host:port,host:port" where there are several.
        dry_run: Decide, and do nothing.
        clock: Monotonic seconds.
        tls: Who asks; None: plain text.

    Raises:
        ConfigError: min_servers is above max_servers.
    """

    def __init__(
        self,
        config: AutoscalerConfig,
        monitor_address: str,
        dry_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
        tls: Identity | None = None,
    ) -> None:
        self._tls = tls
        try:
            self._autoscaler = Autoscaler(config)
        except ValueError as error:
            raise ConfigError(f"autoscaler: {error}") from error
        self._dry_run = dry_run
        self._clock = clock
        self._utilizations = Utilizations()
        self._latency = LatencyMeter()
        self._monitors = Monitors(monitor_address, tls)

    def close(self) -> None:
        """Ends its connections. Idempotent."""
        self._monitors.close()

    def look(self) -> str:
        """One look, to be taken each `interval_s`: what was seen, what was decided and why, for people.

        Raises:
            ClusterError: The monitor, or the balancer, does not answer, or refuses to scale; says why.
        """
        members = ask_members(self._monitors, _CALL_S)
        balancer = _balancer(members)
        decision = self._autoscaler.decide(self._read(members, balancer))
        if decision.servers == decision.before:
            return str(decision)
        if self._dry_run:
            return f"{decision} (nothing is done: this is a dry run)"
        scale_servers(balancer, decision.servers, self._tls)
        self._autoscaler.changed(decision, self._clock())
        return str(decision)

    def _read(self, members: list[Member], balancer: str) -> Reading:
        now = self._clock()
        servers = [m for m in members if m.role is Role.EXPERT_SERVER]
        alive = [m for m in servers if m.state is not MemberState.DEAD]
        counted = [m.id for m in alive if m.state not in _GONE]
        shares = self._utilizations.read(alive, now)
        changing = [f"{m.id} is {m.state.value}" for m in alive if m.state in _COMING_OR_GOING]
        return Reading(
            now=now,
            servers=len(counted),
            work=sum(shares.values()),
            unmeasured=sum(server not in shares for server in counted),
            busiest=max(shares.values(), default=0.0),
            fewest=_fewest(balancer, self._tls),
            token_s=self._latency.read(_token_times(members)),
            changing=", ".join(changing),
        )


def _balancer(members: Iterable[Member]) -> str:
    for member in members:
        if member.role is Role.BALANCER and member.state is not MemberState.DEAD:
            return member.address
    raise ClusterError("no balancer lives in this cluster: start one with `eaas balancer --join`")


def _fewest(balancer: str, tls: Identity | None) -> int:
    with channel(balancer, Role.BALANCER.value, tls) as line:
        try:
            response = balancer_pb2_grpc.BalancerServiceStub(line).GetScale(
                balancer_pb2.GetScaleRequest(), timeout=_CALL_S
            )
        except grpc.RpcError as error:
            raise ClusterError(
                f"the balancer at {balancer} does not answer: {error.details()}"
            ) from error
    return int(response.fewest)


def _token_times(members: Iterable[Member]) -> Mapping[tuple[str, int], tuple[float, float]]:
    """By client, the sum of the times between two tokens, and how many; of those with an endpoint."""
    times = {}
    for m in members:
        if (
            m.role is not Role.ATTENTION_CLIENT
            or m.state is not MemberState.SERVING
            or not m.address
        ):
            continue
        try:
            # Members are no web sites: a proxy of the environment is not for them.
            response = httpx.get(
                f"http://{m.address}/metrics", timeout=_METRICS_S, trust_env=False
            ).raise_for_status()
            times[m.id, m.incarnation] = _token_time(response.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            _log.warning("%s: its /metrics was not read: %s", m.id, error)
    return times


def _token_time(text: str) -> tuple[float, float]:
    """Sum and count of the histogram in a page of Prometheus. Raises ValueError where it is not there."""
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == _TOKEN_TIME
        for sample in family.samples
    }
    try:
        return values[f"{_TOKEN_TIME}_sum"], values[f"{_TOKEN_TIME}_count"]
    except KeyError as error:
        raise ValueError(f"no {error.args[0]} in it") from error

"""The monitor's record of the servers that clients reach."""

from __future__ import annotations

import grpc
import pytest

from eaas.rpc.v1 import common_pb2, monitor_pb2
from eaas.types import Member, MemberState, Role, ServerReach
from monitor.refusal import Refused, reach_of
from monitor.registry import Registry

SERVING = MemberState.SERVING
REACH = (ServerReach("s", 1, "another user's", lost=True), ServerReach("t", 2))


def member(name: str, role: Role, reach: tuple[ServerReach, ...] | None = None) -> Member:
    return Member(name, role, 7, "h", f"{name}:1", SERVING, reach=reach)


def test_a_heartbeat_replaces_the_reach_and_silence_keeps_it() -> None:
    registry = Registry(2.0, 0.5, 0.0)
    incarnation, _ = registry.register(member("c", Role.ATTENTION_CLIENT, ()), 0, 0.0)

    def beat(reach: tuple[ServerReach, ...] | None) -> int:
        events = registry.heartbeat("c", incarnation, 0.1, state=SERVING, reach=reach)
        return len(events)

    def kept() -> tuple[ServerReach, ...] | None:
        living = registry.living("c")
        assert living is not None
        return living.reach

    assert kept() == ()
    assert beat(REACH) == 1
    assert beat(REACH) == beat(None) == 0
    assert kept() == REACH
    # The same incarnation registers again: its next heartbeat reports its reach.
    registry.register(member("c", Role.ATTENTION_CLIENT, ()), incarnation, 0.2)
    assert kept() == REACH
    assert beat(()) == 1
    assert kept() == ()


def test_only_clients_report_a_reach() -> None:
    registry = Registry(2.0, 0.5, 0.0)
    incarnation, _ = registry.register(member("s", Role.EXPERT_SERVER), 0, 0.0)
    with pytest.raises(ValueError, match="not an attention client"):
        registry.heartbeat("s", incarnation, 0.1, state=SERVING, reach=REACH)


def test_a_large_reach_is_refused() -> None:
    request = monitor_pb2.HeartbeatRequest(id="c")
    assert reach_of(request) is None
    request.reach.CopyFrom(ServerReach.to_proto(REACH))
    assert reach_of(request) == REACH
    many = [common_pb2.ServerReach(server_id="x" * 200) for _ in range(3000)]
    request.reach.CopyFrom(common_pb2.Reach(servers=many))
    with pytest.raises(Refused) as caught:
        reach_of(request)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT

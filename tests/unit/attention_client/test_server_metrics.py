from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from attention_client.server_metrics import ServerMetrics
from eaas.types import Member, MemberState, Role


def member(name: str, role: Role, state: MemberState, busy_s: float = 0.0) -> Member:
    return Member(name, role, 1, "here", "here:1", state, experts=4, busy_s=busy_s)


MEMBERS = {
    m.id: m
    for m in (
        member("a", Role.EXPERT_SERVER, MemberState.SERVING, 1.5),
        member("b", Role.EXPERT_SERVER, MemberState.SUSPECT, 2.5),
        member("c", Role.EXPERT_SERVER, MemberState.DEAD, 3.5),
        member("d", Role.BALANCER, MemberState.SERVING),
    )
}


def samples(members: dict[str, Member] | None) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ServerMetrics(lambda _timeout_s: members))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_live_expert_servers_only() -> None:
    assert samples(MEMBERS) == [
        'eaas_expert_server_busy_seconds_total{server="a"} 1.5',
        'eaas_expert_server_busy_seconds_total{server="b"} 2.5',
        'eaas_expert_server_experts{server="a"} 4.0',
        'eaas_expert_server_experts{server="b"} 4.0',
    ]


def test_without_a_monitor_there_are_none() -> None:
    assert samples(None) == []


def test_registering_asks_nobody() -> None:
    asked: list[float] = []

    def ask(timeout_s: float) -> dict[str, Member]:
        asked.append(timeout_s)
        return MEMBERS

    registry = CollectorRegistry()
    registry.register(ServerMetrics(ask))
    assert asked == []
    generate_latest(registry)
    assert len(asked) == 1

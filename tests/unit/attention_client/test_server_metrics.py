from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from attention_client.telemetry.server_metrics import ServerMetrics
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


def samples(
    members: dict[str, Member] | None,
    placed: tuple[str, ...] = (),
    known: dict[str, Member] | None = None,
) -> list[str]:
    registry = CollectorRegistry()
    registry.register(
        ServerMetrics(lambda _timeout_s: members, lambda: known or {}, lambda: placed)
    )
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_live_expert_servers_only() -> None:
    assert samples(MEMBERS) == [
        'eaas_expert_server_busy_seconds_total{server="a"} 1.5',
        'eaas_expert_server_busy_seconds_total{server="b"} 2.5',
        'eaas_expert_server_experts{server="a"} 4.0',
        'eaas_expert_server_experts{server="b"} 4.0',
        'eaas_expert_server_up{server="a"} 1.0',
        'eaas_expert_server_up{server="b"} 1.0',
    ]


def ups(*given: Any, **more: Any) -> list[str]:
    return [line for line in samples(*given, **more) if "_up" in line]


def test_a_dead_server_in_the_placement_is_down() -> None:
    up = [f'eaas_expert_server_up{{server="{name}"}} 1.0' for name in "ab"]
    assert ups(MEMBERS, ("a", "c")) == [*up, 'eaas_expert_server_up{server="c"} 0.0']
    assert ups(MEMBERS, ("a", "b")) == up


def test_without_a_monitor_the_last_known_state_is_exported() -> None:
    assert samples(None, ("a", "c"), MEMBERS) == [
        'eaas_expert_server_up{server="a"} 1.0',
        'eaas_expert_server_up{server="b"} 1.0',
        'eaas_expert_server_up{server="c"} 0.0',
    ]
    assert samples(None) == []


def test_registration_asks_nobody() -> None:
    asked: list[float] = []

    def ask(timeout_s: float) -> dict[str, Member]:
        asked.append(timeout_s)
        return MEMBERS

    registry = CollectorRegistry()
    registry.register(ServerMetrics(ask, dict, tuple))
    assert asked == []
    generate_latest(registry)
    assert len(asked) == 1

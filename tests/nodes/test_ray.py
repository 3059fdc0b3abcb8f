"""A cluster on Ray over several hosts: processes, actors and whole hosts end, and no stream fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from completions import Load
from hosts import Host
from ray_hosts import RayHosts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# A stream's longest pause: what users notice, and room for a busy machine.
_PROCESS_S, _HOST_S = 0.6, 1.0
_SLACK = float(os.environ.get("NODES_SLACK", "4"))


def under_load(world: RayHosts, event: Callable[[], None], servers: int, most_s: float) -> None:
    """Streams run while the event happens and until the cluster is whole again; none may fail."""
    load = Load(world.endpoint, streams=2, tokens=64, headers=world.headers)
    with load.running():
        event()
        world.wait_whole(servers)
    print(f"worst pause {load.worst_pause_s:.2f} s, {len(load.answers)} answers")
    assert load.worst_pause_s < most_s * _SLACK


def host_without_roles(world: RayHosts) -> Host:
    """A host with an expert server, and without the endpoint and the roles on Ray's head."""
    hosts = (world.host_of(server) for server in world.live_servers())
    return next(host for host in hosts if host not in (world.head, world.home))


def test_a_process_and_a_host_end(three_hosts: RayHosts) -> None:
    world = three_hosts
    world.wait_whole(3)
    assert len({world.host_of(server).address for server in world.live_servers()}) == 3
    victim = world.process_of("expert-server-1")
    under_load(world, lambda: os.kill(victim, signal.SIGKILL), 3, _PROCESS_S)
    under_load(world, host_without_roles(world).kill, 2, _HOST_S)
    world.eaas("down", "--on", "ray")
    assert not world.roles()


@pytest.mark.nightly
def test_actors_scaling_and_a_host_that_falls_silent(four_hosts: RayHosts) -> None:
    """Two of four servers run on hosts that are lost, one without a word."""
    world = four_hosts
    world.wait_whole(4)
    (actor,) = world.actors_of("expert-server-1")
    under_load(world, lambda: os.kill(actor, signal.SIGKILL), 4, _PROCESS_S)
    under_load(world, lambda: world.scale(5), 5, _PROCESS_S)
    under_load(world, lambda: world.scale(4), 4, _PROCESS_S)
    victim = host_without_roles(world)
    under_load(world, victim.cut, 3, _HOST_S)
    victim.mend()
    world.wait_whole(4, 180.0)


@pytest.mark.nightly
def test_the_monitor_and_the_controller_end(four_hosts: RayHosts) -> None:
    world = four_hosts
    world.wait_whole(4)
    for role in ("monitor", "balancer"):
        for process in ("its own", "its actor"):
            former = world.member(role)
            (victim,) = [world.process_of(role)] if process == "its own" else world.actors_of(role)

            def event(role: str = role, victim: int = victim, former: Any = former) -> None:
                os.kill(victim, signal.SIGKILL)
                world.wait_replaced(role, former)

            under_load(world, event, 4, _PROCESS_S)
    (actor,) = world.actors_of("controller")
    os.kill(actor, signal.SIGKILL)
    under_load(world, lambda: world.scale(5), 5, _PROCESS_S)


@pytest.mark.nightly
def test_the_head_ends_and_comes_back(hosts_with_redis: RayHosts) -> None:
    """Ray keeps its state in Redis; the monitor, the balancer and the controller are on the head."""
    world = hosts_with_redis
    world.wait_whole(2)

    def event() -> None:
        former = {role: world.member(role) for role in ("monitor", "balancer")}
        world.head.kill()
        world.replace_head()
        for role, one in former.items():
            world.wait_replaced(role, one)
        world.scale(3)

    under_load(world, event, 3, _HOST_S)

"""A cluster on Ray over several hosts survives the end of a process, of an actor and of a whole host."""

from __future__ import annotations

import os
import signal

import pytest

from ray_hosts import RayHosts
from stream_load import StreamLoad

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]


def test_servers_are_spread_and_end_without_a_failed_stream(three_hosts: RayHosts) -> None:
    world = three_hosts
    world.wait_whole(3)
    assert len({world.host_of(server).address for server in world.live_servers()}) == 3
    load = StreamLoad(world.endpoint, streams=2, tokens=64, headers=world.headers)
    with load.running():
        os.kill(world.process_of("expert-server-1"), signal.SIGKILL)
        world.wait_whole(3)
    print("process", load.worst_pause_s)
    hosts = [world.host_of(server) for server in world.live_servers()]
    victim = next(host for host in hosts if host is not world.head)
    load = StreamLoad(world.endpoint, streams=2, tokens=64, headers=world.headers)
    with load.running():
        victim.kill()
        world.wait_whole(2)
    print("host", load.worst_pause_s)

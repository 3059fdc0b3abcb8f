"""Clusters on Ray over hosts that are namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hosts import why_no_hosts
from ray_hosts import RayHosts
from service_box import RedisBox


@contextmanager
def ray_hosts(
    directory: Path, hosts: int, servers: int, redis: Callable[[str], str] | None = None
) -> Iterator[RayHosts]:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    if why := why_no_hosts():
        pytest.skip(why)
    world = RayHosts(directory, hosts, redis)
    try:
        world.up(servers)
        yield world
    finally:
        world.close()


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[RayHosts]:
    """Three hosts, each with an expert server."""
    with ray_hosts(tmp_path, 3, 3) as world:
        yield world


@pytest.fixture
def four_hosts(tmp_path: Path) -> Iterator[RayHosts]:
    """Four hosts, each with an expert server."""
    with ray_hosts(tmp_path, 4, 4) as world:
        yield world


@pytest.fixture
def hosts_with_redis(tmp_path: Path, cleanup: ExitStack) -> Iterator[RayHosts]:
    """Three hosts with two expert servers, none on the head, whose Ray keeps its state in Redis."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")

    def start(host: str) -> str:
        box = RedisBox(tmp_path, host)
        cleanup.callback(box.stop)
        return box.address

    with ray_hosts(tmp_path, 3, 2, start) as world:
        yield world

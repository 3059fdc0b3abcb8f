"""Clusters on Ray over hosts that are namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hosts import why_no_hosts
from ray_hosts import RayHosts


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """Three hosts, each with an expert server."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    if why := why_no_hosts():
        pytest.skip(why)
    world = RayHosts(tmp_path_factory.mktemp("ray"), 3)
    try:
        world.up(3)
        yield world
    finally:
        world.close()

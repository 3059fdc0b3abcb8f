"""Clusters whose experts get the load that the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from control_plane import Plane, eventually
from rebalancing_box import NAMES, Box


@pytest.fixture
def start_box(plane: Plane) -> Callable[..., Box]:
    def start(**fields: Any) -> Box:
        address = plane.monitor().address
        settings = {"expected_servers": 4, "redundancy": 1, "num_redundant_experts": 4}
        settings |= {"step_s": 0.1, "window_size": 10, "step_interval": 10_000}
        balancer = plane.balancer(address, **(settings | fields))
        servers = [plane.server(address, s, node=f"n{i // 2}") for i, s in enumerate(NAMES)]
        box = Box(balancer, servers, address)
        eventually(lambda: box.client.placement() is not None and box.at_rest())
        box.thread.start()
        plane.stack.callback(box.client.close)
        plane.stack.callback(box.thread.join)
        plane.stack.callback(box.over.set)
        eventually(box.is_seen)
        return box

    return start


@pytest.fixture
def box(start_box: Callable[..., Box]) -> Box:
    return start_box()

"""Monitors, balancers and members that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from balancer.main import Balancer
from control_plane import FakeExpertServer, Observer, eventually
from eaas.config import BalancerConfig, MonitorConfig
from monitor.main import Monitor
from rebalancing_box import NAMES, Box


@pytest.fixture
def start_monitor(cleanup: ExitStack) -> Callable[..., Monitor]:
    def start(**fields: Any) -> Monitor:
        monitor = Monitor(MonitorConfig(**fields))
        cleanup.callback(monitor.stop)
        return monitor

    return start


@pytest.fixture
def observe(cleanup: ExitStack) -> Callable[..., Observer]:
    def start(address: str, member_id: str = "observer", **kwargs: Any) -> Observer:
        observer = Observer(address, member_id, **kwargs)
        cleanup.callback(observer.session.close)
        return observer

    return start


@pytest.fixture
def start_balancer(cleanup: ExitStack) -> Callable[..., Balancer]:
    def start(address: str, latency_target_ms: float = 0.0, **fields: Any) -> Balancer:
        config = BalancerConfig(**({"expected_servers": 2, "redundancy": 2} | fields))
        balancer = Balancer(
            config, address, on_stopping=lambda: None, latency_target_ms=latency_target_ms
        )
        cleanup.callback(balancer.stop)
        return balancer

    return start


@pytest.fixture
def start_server(cleanup: ExitStack) -> Callable[..., FakeExpertServer]:
    def start(address: str, name: str, **kwargs: Any) -> FakeExpertServer:
        server = FakeExpertServer(address, name, **kwargs)
        cleanup.callback(server.close)
        return server

    return start


@pytest.fixture
def start_box(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    cleanup: ExitStack,
) -> Callable[..., Box]:
    def start(**fields: Any) -> Box:
        address = start_monitor().address
        settings = {"expected_servers": 4, "redundancy": 1, "num_redundant_experts": 4}
        settings |= {"step_s": 0.1, "window_size": 10, "step_interval": 10_000}
        balancer = start_balancer(address, **(settings | fields))
        box = Box(
            balancer,
            [start_server(address, s, node=f"n{i // 2}") for i, s in enumerate(NAMES)],
            address,
        )
        eventually(lambda: box.client.placement() is not None and box.at_rest())
        box.thread.start()
        cleanup.callback(box.client.close)
        cleanup.callback(box.thread.join)
        cleanup.callback(box.over.set)
        eventually(box.is_seen)
        return box

    return start


@pytest.fixture
def box(start_box: Callable[..., Box]) -> Iterator[Box]:
    return start_box()

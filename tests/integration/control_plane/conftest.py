"""Monitors, balancers and members that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from balancer.main import Balancer
from control_plane import (
    FakeExpertServer,
    Observer,
)
from eaas.config import BalancerConfig, MonitorConfig
from monitor.main import Monitor


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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
    def start(address: str, **fields: Any) -> Balancer:
        config = BalancerConfig(**({"expected_servers": 2, "redundancy": 2} | fields))
        balancer = Balancer(config, address, on_stopping=lambda: None)
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

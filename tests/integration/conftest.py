"""Fixtures of all integration tests."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """Find a port that nothing listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find

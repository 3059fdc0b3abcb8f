"""Fixtures of all integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from attention_client.generation.live_admission import LiveAdmission
from control_plane import Plane


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products do not gain from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plane(cleanup: ExitStack) -> Plane:
    """Monitors, balancers and fake members."""
    return Plane(cleanup)


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that left a full cache of keys and values, to come back later."""
    evicted: list[str] = []
    put_back = LiveAdmission.put_back

    def spy(self: LiveAdmission, request: str) -> None:
        evicted.append(request)
        put_back(self, request)

    monkeypatch.setattr(LiveAdmission, "put_back", spy)
    return evicted

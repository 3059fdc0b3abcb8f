"""Servers that the tests of the HTTP face ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from http_box import (
    Box,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Box]:
    box = Box()
    yield box
    box.close()


@pytest.fixture
def box(shared_box: Box) -> Iterator[Box]:
    """The shared server, good and idle again afterwards."""
    yield shared_box
    shared_box.error, shared_box.slow_s, shared_box.good = None, 0.0, (True, "")
    shared_box.wait_idle()


@pytest.fixture
def own_box() -> Iterator[Box]:
    """A server that the test may ruin."""
    box = Box()
    yield box
    box.close()

"""Fixtures of all integration tests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from control_plane import Plane


@pytest.fixture
def plane(cleanup: ExitStack) -> Plane:
    """Monitors, balancers and fake members."""
    return Plane(cleanup)

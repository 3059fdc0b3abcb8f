"""Budgets of the fuzz tests; `make fuzz` has larger ones."""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis
import pytest


@pytest.fixture(scope="session")
def budget() -> Callable[[int, int], hypothesis.settings]:
    """Make settings for a number of examples (times FUZZ_FACTOR) and of steps for each."""
    factor = int(os.environ.get("FUZZ_FACTOR", "1"))

    def settings(examples: int, steps: int = 50) -> hypothesis.settings:
        return hypothesis.settings(
            max_examples=factor * examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )

    return settings

"""How long fuzzing takes: `make fuzz` has more time."""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis
import pytest


@pytest.fixture(scope="session")
def budget() -> Callable[[int, int], hypothesis.settings]:
    """Settings of so many examples, more of them with FUZZ_FACTOR, of so many steps each."""
    factor = int(os.environ.get("FUZZ_FACTOR", "1"))

    def settings(examples: int, steps: int = 50) -> hypothesis.settings:
        return hypothesis.settings(
            max_examples=factor * examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )

    return settings

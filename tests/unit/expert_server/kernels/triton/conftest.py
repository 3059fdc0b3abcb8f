"""The tests of kernel `triton` run in Triton's interpreter."""

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads this at its import, and in parts that it imports later."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

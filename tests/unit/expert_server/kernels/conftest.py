"""The kernels' tests use small experts, and all threads nevertheless."""

import pytest

from expert_server.kernels import native


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of the compiled kernel share all work."""
    monkeypatch.setattr(native, "_LEARNS", False)

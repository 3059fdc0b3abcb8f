"""The kernels' tests use small experts, and all threads nevertheless."""

from __future__ import annotations

import pytest

from expert_server.kernels import native


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work is too small for the threads of the compiled kernel."""
    monkeypatch.setattr(native, "_ALONE_BYTES", 0)

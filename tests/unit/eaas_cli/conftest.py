"""Clusters that this user runs meanwhile are not those of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas import user_files


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's records, which its commands search."""
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "eaas",))
    return tmp_path / "eaas"

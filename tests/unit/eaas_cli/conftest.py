"""Clusters that this user runs meanwhile are not those of these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eaas import user_files
from eaas.control_plane.balancer_client import BalancerClient
from eaas_cli.commands import app, placement


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's records, which its commands search."""
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "eaas",))
    return tmp_path / "eaas"


@pytest.fixture
def balancers_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command whose call of the balancer gets an answer."""
    member = {"id": "b", "role": "balancer", "state": "SERVING", "address": "127.0.0.1:1"}
    document = {"tls": False, "members": [member]}

    def run(method: str, answer: Any, *words: str) -> Any:
        call = answer if callable(answer) else lambda *_, **__: answer
        monkeypatch.setattr(placement, "fetch_status", lambda *_: document)
        monkeypatch.setattr(BalancerClient, method, call)
        return CliRunner().invoke(app, [*words, "--endpoint", "http://h:1"])

    return run

"""The metrics of vLLM's workers, on sockets in the user's private directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from attention_client.engines.vllm.worker_page import merge, prune, read_page, serve_page
from eaas.cluster_snapshot.counters import read_counters


@pytest.fixture(params=["short", "a long name " * 12])
def runtime(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A private directory, also one that is too long for the address of a socket."""
    place = tmp_path / request.param
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return place / "eaas"


def page(failovers: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("eaas_failovers", "Failovers", ["reason"], registry=registry).labels("lost").inc(
        failovers
    )
    return registry


def test_a_page_is_read_by_pid(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of no use on a socket file.
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    serve_page(page(2))
    assert dict(read_counters(read_page(os.getpid(), 5.0)).failovers) == {"lost": 2.0}
    (socket,) = runtime.glob("*.sock")
    assert socket.stat().st_mode & 0o077 == 0


def test_a_process_without_a_page_has_an_empty_one(runtime: Path) -> None:
    assert read_page(1, 1.0) == ""
    runtime.mkdir(mode=0o700)
    assert read_page(1, 1.0) == ""


def test_a_directory_of_others_is_not_read(runtime: Path) -> None:
    serve_page(page(1))
    runtime.chmod(0o755)
    assert read_page(os.getpid(), 1.0) == ""


def test_sockets_of_ended_workers_are_removed(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    (runtime / "vllm-worker-4194304.sock").touch()
    (runtime / "other.sock").touch()
    prune()
    assert [path.name for path in runtime.iterdir()] == ["other.sock"]


def test_several_workers_have_a_label() -> None:
    text = generate_latest(page(2)).decode()
    assert merge([("a", text), ("b", "")]) == text
    merged = merge([("a", text), ("b", text)])
    assert 'client="a"' in merged
    assert merged.count("# TYPE eaas_failovers_total") == 1
    assert dict(read_counters(merged).failovers) == {"lost": 4.0}

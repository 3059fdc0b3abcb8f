"""Other projects' balancers in our replays, with checkouts made here: no code of theirs is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import peers
from benchmarks.policies import app
from eaas.errors import ConfigError
from simulator.traces import generate_trace, write_trace

# Its plan is the table before, each server's experts turned around by one server.
_FAKE = """
from .abstract import AbstractEplbPolicy

class DefaultEplbPolicy(AbstractEplbPolicy):
    @classmethod
    def rebalance_experts(cls, weight, replicas, groups, nodes, ranks, old):
        assert weight.shape[0] == old.shape[0] and old.shape[1] == replicas
        return old.roll(replicas // ranks, dims=1)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm/distributed/eplb/policy"
    folder.mkdir(parents=True)
    (folder / "abstract.py").write_text("class AbstractEplbPolicy: ...\n")
    (folder / "default.py").write_text(_FAKE)
    return tmp_path


def test_a_peer_and_ours_are_replayed_with_and_without_the_split(
    checkout: Path, tmp_path: Path
) -> None:
    path = tmp_path / "drift.npz"
    write_trace(
        generate_trace("drift", iterations=60, layers=2, experts=16, tokens=64, top_k=2), path
    )
    words = ["--trace", str(path), "--peer", f"vllm={checkout}", "--servers", "4"]
    words += ["--interval", "20"]
    before = set(sys.modules)
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert [row["balancer"] for row in rows] == ["eplb", "fractional", "vllm"]
    for row in rows:
        assert 1 <= row["par_split"] <= row["par"] * (1 + 1e-6)
        assert row["par_split"] <= row["par_dispatch"] * (1 + 1e-6)
    # Each of two plans moves all experts of two layers, but for the next server's that came back.
    assert rows[2]["transit"] == 2 * 2 * 16
    assert rows[0]["score"] == 100
    assert "vllm" not in set(sys.modules) - before
    assert "vllm" in CliRunner().invoke(app, words).stdout


def test_a_missing_file_is_named_with_the_version_that_has_it(checkout: Path) -> None:
    (checkout / "vllm/distributed/eplb/policy/default.py").unlink()
    with pytest.raises(ConfigError, match=r"policy/default\.py; give a checkout of .*0\.32\.0"):
        peers.PEERS["vllm"].load(checkout)


def test_a_missing_import_is_named(checkout: Path) -> None:
    path = checkout / "vllm/distributed/eplb/policy/default.py"
    path.write_text("import surely_not_installed\n")
    with pytest.raises(ConfigError, match="surely_not_installed"):
        peers.PEERS["vllm"].load(checkout)


@pytest.mark.parametrize("text", ["vllm", "tensorrt=/", "vllm=/nowhere"])
def test_a_wrong_option_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--peer {text}: "):
        peers.checkouts([text])


def test_a_peer_needs_a_trace_and_servers_alike(checkout: Path) -> None:
    assert "--trace" in str(CliRunner().invoke(app, ["--peer", f"vllm={checkout}"]).exception)
    peer = peers.PEERS["vllm"]
    with pytest.raises(ConfigError, match="slots 17"):
        peers.PeerPlanner(peer, peer.load(checkout), 4, 17)

"""`python -m benchmarks.policies`: its rows and options, and other projects' balancers in our replays."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balancer.policies import names
from benchmarks import peers
from benchmarks.policies import app, bench_policies, parse_size, peak_mb
from eaas.errors import ConfigError
from simulator.traces import generate_trace, write_trace


def test_every_policy_has_a_row_for_each_size() -> None:
    sizes = [parse_size("2,16,4,20"), parse_size("1,8,4,10")]
    said: list[str] = []
    document = bench_policies(sizes, (), rounds=1, say=said.append)
    assert [(row["servers"], row["slots"], row["policy"]) for row in document["rows"]] == [
        (4, slots, policy) for slots in (20, 10) for policy in names()
    ]
    for row in document["rows"]:
        assert 0 < row["plan_ms"]["min"] <= row["plan_ms"]["median"]
        assert row["plan_ms"]["cpu"] > 0
        assert row["again_ms"]["median"] > 0
        assert row["par_max"] >= row["par_mean"] >= 1
        assert row["gap_mean"] >= 1
        assert row["limit_ms"] is None
        assert row["peak_mb"] is None or 0 < row["peak_mb"] < 100
    assert len(said) == 2


@pytest.mark.parametrize("policy", ["fractional", "spread"])
def test_four_thousand_servers_are_planned_in_little_memory(policy: str) -> None:
    """Dense shares of these ten layers would have 164 MB, and six times as much for all layers."""
    peak = peak_mb(policy, parse_size("10,512,4000,8000"))
    assert peak is None or peak < 80


def test_the_command_prints_json_and_a_table() -> None:
    words = ["--size", "1,8,2,10", "--policy", "eplb", "--rounds", "1"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0
    assert [row["policy"] for row in json.loads(result.stdout)["rows"]] == ["eplb"]
    table = CliRunner().invoke(app, words)
    assert "eplb" in table.stdout
    assert "gap" in table.stdout


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,x", "0,8,2,8", "1,8,2,7", "1,8,2,17"])
def test_a_wrong_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--size {text}"):
        parse_size(text)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="--policy best: give one of spread"):
        bench_policies([parse_size("1,8,2,8")], ["best"], rounds=1, say=lambda _: None)


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


def test_a_peer_and_ours_are_replayed_with_and_without_the_split(checkout, tmp_path) -> None:
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

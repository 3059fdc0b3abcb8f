"""`python -m benchmarks.policies`: its rows, and its options checked."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from balancer.policies import names
from benchmarks.policies import app, bench_policies, parse_size, peak_mb
from eaas.errors import ConfigError


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

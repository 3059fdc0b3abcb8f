"""Traces on an autoscaled group: against fixed groups, and the paper's figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eaas.config import AutoscalerConfig
from eaas_cli.commands import app
from simulator.autoscaling.replay import Outcome, run_autoscaled, run_fixed
from simulator.autoscaling.savings import (
    PAPER_SERVERS,
    busiest_tokens_per_s,
    compare,
    paper_traffic,
    tokens_per_s_at_target,
)
from simulator.autoscaling.serving import ServerModel
from simulator.autoscaling.traffic import Traffic

CONFIG = AutoscalerConfig(max_servers=32)
# A request takes a tenth of a server.
MODEL = ServerModel(tokens_per_s=100.0, token_s=0.1, prompt_tokens=0)


def steady(*parts: tuple[int, float]) -> Traffic:
    """This many requests at a time, for this many seconds."""
    arrivals: list[tuple[float, int]] = []
    begin = 0.0
    for requests, seconds in parts:
        arrivals += [(begin, round(seconds / MODEL.token_s))] * requests
        begin += seconds
    arrival_s, outputs = zip(*arrivals, strict=True)
    prompts = np.zeros(len(arrivals), dtype=np.int64)
    return Traffic("steady", np.array(arrival_s), prompts, np.array(outputs), begin)


def run(traffic: Traffic, servers: int, config: AutoscalerConfig = CONFIG, **more: Any) -> Outcome:
    more = {"fewest": 2, "change_s": 10.0} | more
    return run_autoscaled(traffic, MODEL, servers, config, **more)


def test_the_group_follows_the_load() -> None:
    # The work of 12 servers, then of 3: 20 and 5 at the target.
    outcome = run(steady((120, 3600.0), (30, 3600.0)), 13)
    assert max(n for at, n in outcome.servers if at < 3600) == 20
    assert outcome.last_servers == 5
    times = [at for at, _ in outcome.servers[1:]]
    # A server that comes counts from when it is asked for, one that goes until it has gone.
    assert times[0] == 15.0
    assert min(at for at, n in outcome.servers if at > 3600 and n < 20) == 3600 + 315 + 10
    numbers = [n for _, n in outcome.servers]
    assert set(np.abs(np.diff(numbers))) == {1}
    assert np.diff(times).min() >= CONFIG.cooldown_s


def test_server_hours() -> None:
    outcome = Outcome(7200.0, [(0.0, 4), (1800.0, 5), (3600.0, 3)])
    assert outcome.server_hours == pytest.approx(0.5 * 4 + 0.5 * 5 + 1 * 3)
    assert (outcome.fewest_servers, outcome.most_servers, outcome.last_servers) == (3, 5, 3)
    fixed = run_fixed(steady((10, 1800.0)), MODEL, 6, 15.0)
    assert fixed.server_hours == pytest.approx(3.0)
    assert fixed.load.utilization == pytest.approx(1 / 6)


def test_a_percentile_of_waits_is_one_of_tokens() -> None:
    outcome = Outcome(1.0, [(0.0, 1)], waits=[(0.05, 90.0), (0.0, 0.0), (0.2, 9.0), (1.0, 1.0)])
    assert [outcome.token_s(share) for share in (0.5, 0.9, 0.95, 0.995)] == [0.05, 0.05, 0.2, 1.0]


def test_a_server_that_comes_computes_nothing_yet() -> None:
    # The work of 4 servers: 4 have no room left. The 5th comes after a look, and takes 300 s.
    slow = run(steady((40, 900.0)), 4, change_s=300.0)
    at_once = run(steady((40, 900.0)), 4, change_s=0.0)
    assert slow.servers[:2] == at_once.servers[:2] == [(0.0, 4), (15.0, 5)]
    assert len(slow.servers) == 4
    assert len(at_once.servers) == 4


def test_the_busiest_minute() -> None:
    # 20 tokens a second, then 70 for one minute.
    traffic = steady((2, 300.0), (7, 60.0), (1, 240.0))
    assert busiest_tokens_per_s(traffic, 0.1, 0) == pytest.approx(70.0)
    size = tokens_per_s_at_target(70.0, 4, CONFIG)
    assert 70.0 / (4 * size) == pytest.approx(CONFIG.target_utilization)
    prompt = Traffic("one", np.array([0.0]), np.array([600]), np.array([0]), 120.0)
    # 60 steps of 10 tokens.
    assert busiest_tokens_per_s(prompt, 0.1, 10) == pytest.approx(10.0)
    assert busiest_tokens_per_s(prompt, 0.1, 0) == 0.0


def test_the_figure_of_the_paper() -> None:
    """EaaS, section 5.3: 5,120 of 8,192 requests take 40 of 64 servers, 37.5 % fewer."""
    traffic = paper_traffic(0.05, 600.0, 3600.0)
    assert traffic.requests == 8192
    asked = busiest_tokens_per_s(traffic, 0.05, 0)
    assert asked == pytest.approx(8192 / 0.05)
    config = AutoscalerConfig(max_servers=PAPER_SERVERS)
    model = ServerModel(tokens_per_s_at_target(asked, PAPER_SERVERS, config), 0.05, 0)
    comparison = compare(
        traffic, model, config, [PAPER_SERVERS], start=PAPER_SERVERS, fewest=2, change_s=10.0
    )
    outcome = comparison.autoscaled
    assert {n for at, n in outcome.servers if at < 600} == {64}
    assert outcome.last_servers == 40
    assert comparison.saved_at_end(PAPER_SERVERS) == 0.375
    # The way there takes half an hour of this hour.
    assert 0.2 < comparison.saved(PAPER_SERVERS) < 0.3
    assert outcome.load.slowed == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 400)), min_size=2, max_size=40),
    st.integers(2, 12),
    st.integers(2, 5),
    st.floats(0, 120),
)
def test_coverage_and_cooldown_always_hold(
    requests: list[tuple[float, int]], servers: int, fewest: int, change_s: float
) -> None:
    arrival_s_R = np.cumsum([pause for pause, _ in requests])
    arrival_s_R -= arrival_s_R[0]
    outputs_R = np.array([output for _, output in requests])
    traffic = Traffic(
        "any", arrival_s_R, np.zeros_like(outputs_R), outputs_R, float(arrival_s_R[-1]) + 600
    )
    servers = max(servers, fewest)
    outcome = run(traffic, servers, fewest=fewest, change_s=change_s)
    assert outcome.fewest_servers >= fewest
    assert set(np.abs(np.diff([n for _, n in outcome.servers]))) <= {1}
    assert outcome.server_hours >= fewest * outcome.seconds / 3600 * (1 - 1e-9)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten minutes of ten requests at a time, ten of one."""
    path = tmp_path / "requests.jsonl"
    lines = [
        {"timestamp": 1000 * second, "input_length": 100, "output_length": 100}
        for second in (*range(0, 600, 1), *range(600, 1200, 5))
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "autoscale", *arguments])


def test_the_command_prints_one_document(trace: Path) -> None:
    result = invoke("--trace", str(trace), "--fixed", "2,4,4", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["trace"]["requests"] == 720
    names = [group["group"] for group in document["groups"]]
    assert names == ["autoscaled", "fixed 2", "fixed 4"]
    autoscaled, small, large = document["groups"]
    # 4 servers are right for the busiest minute, and where it starts.
    assert document["autoscaler"]["max_servers"] == 4
    assert document["servers_over_time"][0] == [0.0, 4]
    assert autoscaled["servers"]["fewest"] == 2
    assert small["server_hours"] < autoscaled["server_hours"] < large["server_hours"]
    assert large["saved_by_autoscaling"] == pytest.approx(
        1 - autoscaled["server_hours"] / large["server_hours"]
    )
    assert large["saved_at_end"] == pytest.approx(0.5)


def test_the_command_prints_a_table(trace: Path) -> None:
    result = invoke("--trace", str(trace), "--fixed", "4", "--start", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "fixed 4" in line]
    assert rows[0][:3] == ["fixed", "4", "4"]
    assert "Assumptions" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --trace FILE, or --paper in its place"),
        (["--trace", "x", "--paper"], "give --trace FILE, or --paper in its place"),
        (["--trace", "x", "--fixed", "8,0"], "--fixed 8,0: give whole numbers of at least 1"),
        (["--trace", "no/such"], "no/such: No such file or directory; give JSON lines"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_a_start_outside_of_the_limits_is_wrong(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("autoscaler: {min_servers: 6}")
    result = invoke("--trace", str(trace), "--fixed", "4", "--config", str(config))
    assert "min_servers 6 is above max_servers 4" in str(result.exception)


def test_a_trace_in_seconds_is_read_so_and_said(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    rows = ({"timestamp": i / 2, "input_length": 100, "output_length": 10} for i in range(240))
    path.write_text("\n".join(map(json.dumps, rows)))
    result = invoke("--trace", str(path), "--fixed", "1", "--max-servers", "2", "--json")
    assert json.loads(result.stdout)["trace"]["seconds"] == 119.5
    assert "timestamp is read in s, 240 requests in 119.5 s: --time-unit" in result.stderr
    told = invoke("--trace", str(path), "--time-unit", "s", "--max-servers", "2", "--json")
    assert json.loads(told.stdout)["trace"]["seconds"] == 119.5
    assert told.stderr == ""
    short = invoke("--trace", str(path), "--time-unit", "ms", "--max-servers", "2", "--json")
    assert "240 requests in 0.119 s, read in ms: --time-unit" in short.stderr

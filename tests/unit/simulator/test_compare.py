"""Comparisons: rows in the requested order, scored against EPLB every 1,024 iterations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eaas.errors import ConfigError
from scripts import script
from simulator import compare
from simulator.placement.calibration import deviations
from simulator.placement.losses import Losses
from simulator.traces import REGIMES, Trace, generate_trace

KEYS = [
    *("policy", "servers", "slots", "interval", "par_mean", "par_p99", "transit", "moved_gb"),
    *("plans", "plan_ms", "time_s", "score"),
]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate_trace("skewed", iterations=1200, layers=2, experts=16, tokens=128, top_k=2)


def test_rows(trace: Trace) -> None:
    told: list[tuple[str, float]] = []
    comparison = compare(
        trace,
        ["static", "eplb"],
        servers=[4, 2],
        intervals=[100, 1024],
        progress=lambda what, part: told.append((what, part)),
    )
    rows = comparison.document()["rows"]
    assert all(list(row) == KEYS for row in rows)
    assert [(row["servers"], row["policy"], row["interval"]) for row in rows] == [
        (4, "static", 100),
        (4, "eplb", 100),
        (4, "eplb", 1024),
        (2, "static", 100),
        (2, "eplb", 100),
        (2, "eplb", 1024),
    ]
    for row in rows:
        base = comparison.baselines[row["servers"]]
        base_s = 60 * base.par_mean + base.transit * 88_080_384 / 9e11
        row_s = 60 * row["par_mean"] + row["transit"] * 88_080_384 / 9e11
        assert row["score"] == pytest.approx(100 * base_s / row_s)
        assert (row["interval"] == 1024) == (row["score"] == 100.0)
        assert 1 <= row["par_mean"] <= row["par_p99"]
        assert (row["plan_ms"] > 0) == (row["policy"] != "static")
    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert told[-1] == ("eplb", 1.0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"policies": ["eplb", "x"]}, "policy x"),
        ({"intervals": [5, 1200]}, "interval 1200: the trace has only 1200"),
        ({"slots": 15}, "slots 15"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_replay(trace, wrong, named) -> None:
    arguments: dict[str, Any] = {"policies": ["eplb"], "servers": [2], "intervals": [9], **wrong}
    told: list[float] = []
    with pytest.raises(ConfigError, match=named):
        compare(trace, **arguments, progress=lambda _what, part: told.append(part))
    assert told == []


@pytest.mark.parametrize(("regime", "dataset"), [("skewed", "LmSys"), ("flips", "Mix")])
def test_regimes_are_near_the_published_figures(regime: str, dataset: str) -> None:
    # Without time for a plan: what popularity and noise give.
    assert REGIMES[regime].dataset == dataset
    found = deviations(generate_trace(regime, iterations=16), dataset)
    assert [row["interval"] for row in found["rows"]] == [None] * 4
    assert found["worst_off"] < 0.1
    assert found["mean_off"] == pytest.approx(np.mean([abs(row["off"]) for row in found["rows"]]))


def test_intervals_that_do_not_fit_into_the_trace_are_left_out() -> None:
    found = deviations(generate_trace("skewed", iterations=300, layers=1, tokens=64), "LmSys")
    rows = {(row["servers"], row["interval"]): row for row in found["rows"]}
    assert set(rows) == {(s, i) for s in (32, 64, 128, 256) for i in (None, 256)}
    assert all((row["transit"] > 0) == (interval == 256) for (_, interval), row in rows.items())
    assert rows[64, 256]["published_par"] == 1.2865
    assert rows[64, 256]["off"] == pytest.approx(rows[64, 256]["par"] / 1.2865 - 1)


# -- losses ---------------------------------------------------------------------------------------------


def test_tokens_of_experts_without_another_node() -> None:
    holds_SE = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    losses = Losses(("r/a", "r/a", "r/b", "s/c"))
    assert losses.node == losses.rack == 0.0
    losses.add(holds_SE, np.array([3.0, 5.0, 2.0]))
    # Node a has expert 0 alone, and rack r experts 0 and 1.
    assert losses.node == pytest.approx(0.3)
    assert losses.rack == pytest.approx(0.8)


def test_policies_that_know_the_nodes_lose_nothing_with_two_replicas() -> None:
    rng = np.random.default_rng(1)
    trace = Trace(rng.poisson(20.0, (40, 2, 16)).astype(np.uint8))
    found = compare(
        trace, ["spread", "fractional"], servers=[8], intervals=[8], slots=32, nodes=4, racks=2
    )
    spread, fractional = found.replays
    # Until the first plan each expert has one replica.
    assert 0 < spread.losses.node < 0.1
    assert spread.losses.rack < 0.2
    assert 0 < fractional.losses.node < 0.3
    assert {"node_loss", "rack_loss"} <= found.document()["rows"][0].keys()
    with pytest.raises(ConfigError, match="9 nodes in 1 racks"):
        compare(trace, ["spread"], servers=[8], intervals=[8], nodes=9)


def test_compare_policies(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = script(Path(__file__).parents[3] / "examples" / "compare_policies.py").main()
    scores = {run.policy: comparison.score(run) for run in comparison.replays}
    assert max(scores, key=scores.__getitem__) == "fractional+split"
    shown = capsys.readouterr().out
    assert "planned PAR 1.0000" in shown
    assert len(shown.splitlines()) == 4

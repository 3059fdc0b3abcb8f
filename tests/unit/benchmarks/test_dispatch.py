"""`python -m benchmarks.dispatch`: its arithmetic and its options."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dispatch import Plan, layer, make_plan, run
from benchmarks.dispatch.cell import Round, cell_row
from benchmarks.dispatch.turns import WARM_CALLS, Turn, summary, take_turn
from eaas.errors import ClusterError, ConfigError
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import Worker, working

ROOT = Path(__file__).parents[3]
LAYER = Shape(64, 32, 4, 2)


def plan_of(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "transports": (),
        "known_transports": ("shm", "grpc"),
        "hidden": "2048,7168",
        "tokens": "1,8",
        "rounds": 1,
        "with_server": False,
    }
    return make_plan(**(asked | changes))


# -- options ------------------------------------------------------------------------------------------


def test_a_plan() -> None:
    plan = plan_of(hidden="64,32,64", tokens="8,1,8")
    assert (plan.transports, plan.hidden, plan.tokens) == (("shm", "grpc"), (64, 32), (1, 8))
    assert plan_of(transports=["grpc"]).transports == ("grpc",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transports": ["pigeon"]}, "--transport pigeon: give one of shm, grpc"),
        ({"hidden": "2048;7168"}, "--hidden 2048;7168: give whole numbers"),
        ({"hidden": "0"}, "--hidden 0: give whole numbers of at least 1"),
        ({"tokens": ""}, "--tokens : give whole numbers"),
        ({"device": "gpu"}, "--device gpu: give one of cpu, cuda"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["benchmarks.dispatch", "--transport", "pigeon"],
            "--transport pigeon: give one of shm, grpc",
        ),
        (
            ["eaas_cli", "bench", "serve", "--baseline", "vllm"],
            "--baseline vllm: give one of transformers, kernels",
        ),
    ],
)
def test_the_command_prints_one_line_and_ends_with_2(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"eaas: error: {message}")
    assert done.stderr.count("\n") == 1


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "usable_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^--device cuda: torch finds no GPU here; install"):
        run.bench_dispatch(plan_of(device="cuda"), lambda _line: None)


def test_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "usable_cores", lambda: 1)
    with pytest.raises(ConfigError, match="two cores"):
        run.bench_dispatch(plan_of(), lambda _line: None)


# -- arithmetic ---------------------------------------------------------------------------------------


def test_a_turn_is_all_of_its_calls() -> None:
    turn = Turn.of([1000 * us for us in range(1, 102)])
    assert (turn.p50_us, turn.p99_us, turn.calls) == (51.0, 100.0, 101)


def test_a_figure_is_the_median_over_the_turns() -> None:
    turns = [Turn(10.0, 100.0, 20), Turn(11.0, 900.0, 20), Turn(90.0, 101.0, 20)]
    assert summary(turns) == {"p50": 11.0, "p99": 101.0}
    assert figure(1234.56) == 1235


def test_differences_and_ratios_are_the_rounds_own() -> None:
    def one(floor: float, exchange: float) -> Round:
        return Round(Turn(floor, floor, 20), Turn(exchange, exchange, 20), Turn(200, 300, 20), 7.0)

    row = cell_row("shm", 64, 1, (328, 320), [one(1, 100), one(2, 50), one(40, 120)])
    assert row["exchange_us"] == {"p50": 100, "p99": 100}
    assert row["floor_us"] == {"p50": 2, "p99": 2}
    assert row["over_floor_us"] == 80  # of 99, 48, 80; and not 100 - 2
    assert row["times_floor"] == 25  # of 100, 25, 3; and not 100 / 2
    assert (row["rounds"], row["calls"]) == (3, 60)


def test_the_first_calls_of_a_turn_do_not_count() -> None:
    calls: list[int] = []
    took = take_turn(lambda: calls.append(0), 0.0, least=3)
    assert len(took) == 3
    assert len(calls) == WARM_CALLS + 3
    assert len(take_turn(lambda: None, 0.005, least=1)) > 1


def test_the_layer_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "free_bytes", lambda: 3 << 30)
    assert "needs 3.5 GB of memory, and 3.2 GB are free" in layer.lack_of_memory(
        Shape(2048, 768, 128, 8)
    )
    assert layer.lack_of_memory(LAYER) == ""


def test_a_child_that_fails_is_quoted() -> None:
    start = partial(Worker, "broken", "benchmarks.dispatch.server_process")
    with pytest.raises(ClusterError, match=r"broken ended .* KeyError: 'layer'"), working([start]):
        pass

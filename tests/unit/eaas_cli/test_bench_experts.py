"""`eaas bench experts`: its arithmetic, its options, and a small run from end to end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eaas import free_memory
from eaas.errors import ConfigError
from eaas_cli.bench.experts import Plan, bench_experts, make_plan, report
from eaas_cli.bench.experts.limits import Speed, limit, stored_bytes
from eaas_cli.bench.experts.places import Cpu, Way
from eaas_cli.bench.experts.plan import BUILT_IN, Shape
from eaas_cli.bench.experts.rows import Sample, kernel_row
from eaas_cli.bench.experts.run import Bench, affordable_rounds
from eaas_cli.bench.experts.source import Batch, Batches, Source
from eaas_cli.commands import app
from expert_server.kernels.choose import KERNELS
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.reference import ReferenceKernel

A, B = BUILT_IN
TINY = Shape(64, 32, 4, 2)
SPEED = Speed(read=25e9, multiply=1e12)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cheap_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheap limits; the figures are meaningless."""
    monkeypatch.setattr(Cpu, "settle_s", 0.0)
    monkeypatch.setattr(Cpu, "read_bytes", 4 << 20)
    monkeypatch.setattr(Cpu, "products", ((64, 64, 64),))


def tiny(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "shapes": ["64,32,4,2"],
        "tokens": "1,8",
        "dtypes": ["float32"],
        "kernels": ["reference"],
        "rounds": 1,
        "threads": 1,
    }
    return make_plan(**(asked | changes))


# -- the limit ----------------------------------------------------------------------------------------


def test_bytes_of_an_expert() -> None:
    assert stored_bytes(A, "bfloat16") == 3 * 2048 * 768 * 2
    assert stored_bytes(A, "float32") == 3 * 2048 * 768 * 4
    # A scale for each output of gate, up and down.
    assert stored_bytes(A, "int8") == 3 * 2048 * 768 + 4 * (768 + 768 + 2048)
    # A scale for each 128 weights.
    assert stored_bytes(A, "int4") == 3 * 2048 * 768 // 2 + 4 * 3 * 2048 * 768 // 128
    # An incomplete group has a scale, too.
    assert stored_bytes(Shape(130, 1, 1, 1), "int4") == 3 * 130 // 2 + 4 * (2 * 2 + 130)
    # As checkpoints have them: a byte, or a float16, for each 32 weights.
    weights = 3 * 2048 * 768
    assert stored_bytes(A, "fp8") == weights + 4 * weights // 128**2
    assert stored_bytes(A, "mxfp4") == weights // 2 + weights // 32
    assert stored_bytes(A, "int4-g32") == weights // 2 + 2 * weights // 32


def test_decode_is_bound_by_memory_and_prefill_by_the_product() -> None:
    decode = limit(A, "bfloat16", tokens=1, active=8, speed=SPEED)
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(8 * 3 * 2048 * 768 * 2 / 25e9)
    prefill = limit(A, "bfloat16", tokens=2048, active=128, speed=SPEED)
    assert prefill.bound == "compute"
    # Gate, up and down: a multiplication and an addition for each weight and pair.
    assert prefill.seconds == pytest.approx(2048 * 8 * 2 * 3 * 2048 * 768 / 1e12)


# -- options ------------------------------------------------------------------------------------------


def test_shapes_and_tokens_are_measured_once() -> None:
    assert make_plan().shapes == (A, B)
    assert tiny(shapes=["64,32,4,2", "64,32,4,2"]).shapes == (TINY,)
    assert tiny(shapes=[str(B)]).shapes == (B,)
    assert tiny(tokens="8,1,8").tokens == (1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": ["64,32,4"]}, "--shape 64,32,4: give four numbers H,I,E,K"),
        ({"shapes": ["64,32,4,x"]}, "--shape 64,32,4,x: give whole numbers"),
        ({"shapes": ["64,0,4,2"]}, "--shape 64,0,4,2: give whole numbers of at least 1"),
        ({"shapes": ["64,32,4,5"]}, "--shape 64,32,4,5: a token cannot go to 5 of 4 experts"),
        ({"tokens": ""}, "--tokens : give whole numbers"),
        ({"tokens": "1,-8"}, "--tokens 1,-8: give whole numbers of at least 1"),
        (
            {"dtypes": ["fp16"]},
            "--dtype fp16: give one of bfloat16, float32, int8, int4, fp8, mxfp4",
        ),
        ({"kernels": ["fast"]}, "--kernel fast: give one of native, reference"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(**changes)


# -- measuring ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap_limits")
def test_each_call_is_between_two_measurements_and_the_order_rotates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        Cpu, "ways_to_read", lambda _place: {"count": Way(1, lambda: order.append("read"))}
    )

    def baseline(_place: Cpu, name: str, source: Source) -> Any:
        def compute(batch: Batch) -> torch.Tensor:
            order.append(name)
            return source.compute(name, batch)

        return compute

    monkeypatch.setattr(Cpu, "baseline", baseline)
    rounds_begin = []
    bench_experts(
        tiny(tokens="8", rounds=2),
        lambda line: rounds_begin.append(len(order)) if "rounds" in line else None,
    )
    eager, grouped, batched = Cpu.baselines
    # The kernel, which leaves no word, is first of the first round and last of the second.
    first = ["read", "read", eager, "read", grouped, "read", batched, "read"]
    second = [eager, "read", grouped, "read", batched, "read", "read"]
    assert order[rounds_begin[0] :] == first + second


@pytest.mark.parametrize(
    ("wanted", "round_s", "rounds"), [(5, 1, 5), (5, 12, 5), (5, 15, 4), (5, 99, 3), (2, 99, 2)]
)
def test_slow_rounds_are_fewer(wanted: int, round_s: float, rounds: int) -> None:
    assert affordable_rounds(wanted, round_s, budget_s=60) == rounds


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(0, 99))
def test_a_token_goes_to_distinct_experts(tokens: int, seed: int) -> None:
    batches = Batches(TINY, torch.float32, 9)
    batch = batches.get(tokens, seed)
    assert batch.x_TH.shape == (tokens, 64)
    assert all(len(set(ids)) == 2 and max(ids) < 4 for ids in batch.ids_TK.tolist())
    assert torch.allclose(batch.scores_TK.sum(1), torch.ones(tokens))
    largest = batches.get(9, seed)
    assert torch.equal(batch.ids_TK, largest.ids_TK[:tokens])
    assert torch.equal(batch.scores_TK, largest.scores_TK[:tokens])


@pytest.mark.parametrize("implementation", Cpu.baselines)
def test_transformers_computes_the_same_on_the_same_weights(implementation: str) -> None:
    source = Source(TINY, torch.float32)
    batch = Batches(TINY, torch.float32, 5).get(5, 0)
    exact_TH = source.exact(batch)
    assert exact_TH.dtype == torch.float64
    assert torch.allclose(
        source.compute(implementation, batch).double(), exact_TH, rtol=1e-4, atol=1e-5
    )


# -- rows ---------------------------------------------------------------------------------------------


def samples_of(*seconds: float, active: int = 8) -> list[Sample]:
    return [Sample(took, SPEED, active) for took in seconds]


def test_a_row_has_the_medians_of_the_rounds() -> None:
    least_s = 8 * 3 * 2048 * 768 * 2 / 25e9
    ours = samples_of(2 * least_s, least_s, 4 * least_s)
    # The ratios are 5, 2 and 3; the ratio of the medians would be 4.
    eager = samples_of(10 * least_s, 2 * least_s, 12 * least_s)
    baselines = {"eager": eager, "grouped_mm": ours, "batched_mm": None}
    row = kernel_row(A, 1, "bfloat16", "native", ours, baselines, "memory", rel_error=0.00123456)
    assert row["shape"] == "2048,768,128,8"
    assert (row["dtype"], row["tokens"], row["kernel"]) == ("bfloat16", 1, "native")
    assert row["ms"] == pytest.approx(2e3 * least_s, rel=1e-3)
    assert row["roofline_fraction"] == 0.5
    assert row["roofline_spread"] == [0.25, 1.0]
    assert row["bound"] == "memory"
    assert row["speedup"] == {"eager": 3.0, "grouped_mm": 1.0, "batched_mm": None}
    assert (row["rel_error"], row["rounds"]) == (0.00123, 3)


def test_a_limit_is_of_its_own_round() -> None:
    slow, fast = Speed(10e9, 1e12), Speed(40e9, 1e12)
    least_s = 3 * 2048 * 768 * 2 / 10e9
    ours = [Sample(least_s, slow, 1), Sample(least_s / 4, fast, 1), Sample(least_s, slow, 1)]
    row = kernel_row(A, 1, "bfloat16", "native", ours, {}, "memory", 0.0)
    assert row["roofline_spread"] == [1.0, 1.0]


# -- the run ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap_limits")
def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "64,32,4,2", "--tokens", "1,8", "--rounds", "3"]
    dtypes = ["--dtype", "bfloat16", "--dtype", "float32"]
    command = ["bench", "experts", *arguments, *dtypes, "--threads", "1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "T=8" in result.stderr
    document = json.loads(result.stdout)
    assert set(document) == {"machine", "rounds", "rows", "auto", "skipped"}
    cells = {(row["dtype"], row["tokens"], row["kernel"]) for row in document["rows"]}
    picks = {entry["dtype"]: entry["picked"] for entry in document["auto"]}
    assert picks.keys() == {"bfloat16", "float32"}
    assert cells >= {(dtype, tokens, picks[dtype]) for dtype in picks for tokens in (1, 8)}
    # All kernels of a cell have the same bound.
    assert len({(row["dtype"], row["tokens"], row["bound"]) for row in document["rows"]}) == 4
    for row in document["rows"]:
        assert row["shape"] == "64,32,4,2"
        assert row["rounds"] == 3
        assert row["ms_spread"][0] <= row["ms"] <= row["ms_spread"][1]
        assert row["bound"] in ("memory", "compute")
        # Medians of fractions lie between the fractions of the rounds, which are limits over times.
        low, high = row["roofline_spread"]
        assert 0 < low <= row["roofline_fraction"] <= high
        assert set(row["speedup"]) == {"eager", "grouped_mm", "batched_mm"}
        assert all(ratio > 0 for ratio in row["speedup"].values())
        assert 0 < row["rel_error"] < (1e-2 if row["dtype"] == "bfloat16" else 1e-5)
        assert row["auto"] == (row["kernel"] == picks[row["dtype"]])
    machine = document["machine"]
    assert machine["threads"] == 1
    assert set(machine["gemm_tflops"]) == {"bfloat16", "float32"}
    for measured in (machine["read_gb_per_s"], *machine["gemm_tflops"].values()):
        assert 0 < measured["least"] <= measured["median"] <= measured["most"]
    # A measurement before and after each of the calls, at each of two batch sizes, for two dtypes.
    assert machine["read_gb_per_s"]["measurements"] >= 4 * 3 * (1 + len(Cpu.baselines))
    assert 0 <= machine["busy_cores_elsewhere"] <= 1.1 * (os.cpu_count() or 1)
    machine["busy_cores_elsewhere"] = 1.5
    report.print_report(document)
    printed = capsys.readouterr().out
    assert sum(printed.count(kernel) for kernel in KERNELS) >= len(document["rows"])
    assert "Other processes kept 1.5 cores busy" in printed


@pytest.mark.usefixtures("cheap_limits")
def test_stored_weights_are_computed_without_a_further_error() -> None:
    plan = tiny(tokens="8", dtypes=["fp8", "mxfp4", "int4-g32"])
    rows = bench_experts(plan, lambda _line: None)["rows"]
    assert [row["dtype"] for row in rows] == ["fp8", "mxfp4", "int4-g32"]
    assert all(0 < row["rel_error"] < 1e-2 for row in rows)


@pytest.mark.usefixtures("cheap_limits")
def test_a_skipped_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_arguments: Any) -> Any:
        raise UnsupportedError("no such CPU")

    monkeypatch.setitem(KERNELS, "native", refuse)
    monkeypatch.setattr(Bench, "most_copied_bytes", 0)
    plan = tiny(tokens="8", kernels=["reference", "native"])
    document = bench_experts(plan, lambda _line: None)
    assert [row["kernel"] for row in document["rows"]] == ["reference"]
    assert document["rows"][0]["speedup"]["batched_mm"] is None
    base = {"shape": "64,32,4,2", "dtype": "float32"}
    copies = "it would copy 0.0 GB of weights in each call"
    assert document["skipped"] == [
        base | {"what": "native", "reason": "no such CPU"},
        base | {"what": "batched_mm", "reason": copies, "tokens": 8},
    ]
    with pytest.raises(ConfigError, match="nothing could be measured: native: no such CPU"):
        bench_experts(tiny(kernels=["native"]), lambda _line: None)


@pytest.mark.usefixtures("cheap_limits")
def test_a_layer_larger_than_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 1 << 30)
    plan = tiny(shapes=[str(A)], dtypes=["bfloat16"])
    with pytest.raises(
        ConfigError, match=r"reference: .* GB of memory, and 1\.1 GB are free: name"
    ):
        bench_experts(plan, lambda _line: None)


@pytest.mark.usefixtures("cheap_limits")
def test_kernels_are_closed_when_a_run_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ReferenceKernel, "close", lambda kernel: closed.append(kernel.name))

    def interrupted(line: str) -> None:
        if "rounds" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_experts(tiny(), interrupted)
    # The oracle in float64 needs no closing: it has no threads.
    assert closed == ["reference"]


# -- the machine --------------------------------------------------------------------------------------

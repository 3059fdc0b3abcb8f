"""`eaas bench experts --device cuda` without a GPU: a fake of torch.cuda, and Triton's interpreter."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from eaas.errors import ConfigError
from eaas_cli.bench.experts import make_plan, places, tune
from eaas_cli.bench.experts.places import Cuda
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches, Source, source_form
from eaas_cli.commands import app
from expert_server.kernels import KernelSpec
from expert_server.kernels.kernel import UnsupportedError
from interpreted_triton import interpreted_kernel, needs_triton

GIB = 1 << 30
TINY = Shape(64, 32, 4, 2)


class Event:
    """An event of a device that computes at once."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self._at: float | None = None

    def record(self) -> None:
        self.calls["record"] += 1
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        assert self._at is not None
        self.calls["wait"] += 1

    def elapsed_time(self, end: Event) -> float:
        assert self._at is not None
        assert end._at is not None
        return 1e3 * (end._at - self._at)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A GPU whose memory is the host's; returns the calls of events."""
    fakes = {
        "Event": Event,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (GIB, 80 * GIB),
        "get_device_name": lambda: "Fake",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(places, "find_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(Cuda, "warm_ups", 1)
    monkeypatch.setattr(Cuda, "read_bytes", 1 << 20)
    monkeypatch.setattr(Cuda, "products", ((64, 64, 64),))
    # Triton reads it also in parts that it imports later.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Event.calls.clear()
    return Event.calls


def run(*words: str) -> Any:
    tiny = ["--device", "cuda", "--shape", "64,32,4,2"]
    return CliRunner().invoke(app, ["bench", "experts", *tiny, *words])


@needs_triton
def test_a_small_run(fake_cuda: Counter[str]) -> None:
    interpreted_kernel()
    result = run("--tokens", "8", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    cells = [(row["dtype"], row["tokens"], row["kernel"]) for row in document["rows"]]
    assert sorted(cells) == [(dtype, 8, "triton") for dtype in ("bfloat16", "fp8", "mxfp4")]
    for row in document["rows"]:
        assert row["ms"] > 0
        assert row["roofline_fraction"] > 0
        assert row["speedup"]["grouped_mm"] > 0
        assert 0 < row["rel_error"] < 1e-2
    machine = document["machine"]
    assert machine["device"] == "Fake"
    assert machine["read_gb_per_s"]["way"] in ("copy", "sum")
    assert machine["gemm_tflops"]["bfloat16"]["way"] == "torch 64 x 64 x 64"
    assert document["auto"] == []
    # vLLM has an environment of its own.
    assert [entry["what"] for entry in document["skipped"]] == ["vllm"]
    assert fake_cuda["record"] == 2 * fake_cuda["wait"] > 0


NO_INT4 = "--dtype int4: this kernel does not quantise to int4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cuda --dtype bfloat16 --dtype int4", NO_INT4),
        ("--device cuda --dtype bfloat16 --dtype int4 --tune", NO_INT4),
        ("--device cuda --kernel native", "--kernel native: give one of triton"),
        ("--device gpu", "--device gpu: give one of cpu, cuda"),
        ("--tune", "--tune measures a GPU's tiles: add --device cuda"),
        ("--device cuda", "--device cuda: torch finds no GPU here"),
    ],
)
def test_a_wrong_call_is_refused_before_a_gpu_is_used(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "experts", *words.split()])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert result.stdout == ""


@needs_triton
@pytest.mark.usefixtures("fake_cuda")
def test_a_layer_larger_than_the_device_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted_kernel()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    result = run("--tokens", "1", "--dtype", "bfloat16")
    assert "GB of memory, and 0.0 GB are free" in str(result.exception)


def install_vllm(
    monkeypatch: pytest.MonkeyPatch, fused_experts: Callable[..., torch.Tensor]
) -> None:
    """Make vLLM's fused MoE importable."""
    monkeypatch.setattr(places, "find_spec", lambda _name: object())
    name = "vllm.model_executor.layers.fused_moe.fused_moe"
    while name:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        name = name.rpartition(".")[0]
    module: Any = sys.modules["vllm.model_executor.layers.fused_moe.fused_moe"]
    module.fused_experts = fused_experts


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """What vLLM's function computes."""
    assert topk_ids.dtype is torch.int32
    gate, up = torch.einsum("th,tknh->tkn", hidden_states, w1[topk_ids]).chunk(2, -1)
    terms = torch.einsum("tki,tkhi->tkh", functional.silu(gate) * up, w2[topk_ids])
    return torch.einsum("tkh,tk->th", terms, topk_weights)


@pytest.mark.usefixtures("fake_cuda")
def test_vllm_computes_the_same_on_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch, fused_experts)
    source, batch = Source(TINY, torch.float32), Batches(TINY, torch.float32, 5).get(5, 0)
    out_TH = Cuda().baseline("vllm", source)(batch)
    assert torch.allclose(out_TH.double(), source.exact(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fake_cuda")
def test_a_version_of_vllm_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch, lambda hidden_states: hidden_states)
    with pytest.raises(UnsupportedError, match=r"^it fails: .* unexpected keyword argument 'w1'"):
        Cuda().baseline("vllm", Source(TINY, torch.float32))


@pytest.mark.usefixtures("fake_cuda")
def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'expert-as-a-service\[triton\]'"):
        Cuda()


# -- tiles ---------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(
    fake_cuda: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[list[dict[str, Any]], list[str]]]:
    """Tunes a device on which a call takes `seconds(kernel, tokens)`; returns the entries and the lines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Cuda, "warm_ups", 0)
    monkeypatch.setattr(tune, "CALLS", 1)

    def run(seconds: Callable[[Any, int], float], **asked: Any) -> Any:
        def timed(_place: Cuda, call: Any) -> tuple[float, torch.Tensor]:
            kernel, batch = call.args
            return seconds(kernel, len(batch.ids_TK)), torch.zeros(0)

        interpreted_kernel()
        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(Cuda, "timed", timed)
            plan = make_plan(threads=1, device="cuda", **asked)
            return tune.tune(plan, Cuda(), lines.append), lines

    return run


@needs_triton
def test_the_fastest_tiles_are_kept_for_the_devices_servers(
    tuned: Callable[..., Any], fake_cuda: Counter[str]
) -> None:
    """Times as of a device on which wide tiles are fast."""
    from expert_server.kernels.gpu.tiles import Coding, tiles_of

    def seconds(kernel: Any, tokens: int) -> float:
        tile = kernel.tiles["many" if tokens > 64 else "few"]
        return 1 / tile.columns - tile.warps / 10**6

    shapes, dtypes = ["64,32,4,2", "32,32,4,2"], ["bfloat16", "mxfp4"]
    entries, _ = tuned(seconds, shapes=shapes, tokens="1,8,80", dtypes=dtypes)
    assert [(entry["dtype"], entry["bucket"]) for entry in entries] == [
        (dtype, bucket) for dtype in dtypes for bucket in ("few", "many")
    ]
    assert all(entry["share"] < 1 for entry in entries)
    for coding in (Coding.BFLOAT16, Coding.MXFP4):
        tiles = tiles_of("interpreted", coding)
        few, many = tiles["few"], tiles["many"]
        assert (few.columns, few.warps, many.columns) == (128, 8, 128)
    form = source_form(TINY)
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16))
    assert kernel.tiles == tiles_of("interpreted", Coding.BFLOAT16)
    assert not fake_cuda


@needs_triton
def test_a_tile_that_does_not_fit_is_skipped(
    tuned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it fits one of two batch sizes only."""
    from expert_server.kernels.gpu.tiles import Coding, Tile, candidates, tiles_of

    monkeypatch.setattr("expert_server.kernels.gpu.tiles.bucket_of", lambda _rows, _experts: "few")
    fitting = candidates(Coding.BFLOAT16)["few"][1]

    def seconds(kernel: Any, tokens: int) -> float:
        if kernel.tiles["few"] != fitting and tokens > 1:
            raise RuntimeError("OutOfResources: out of resource: shared memory")
        return 1.0

    (entry,), lines = tuned(seconds, shapes=["64,32,4,2"], tokens="1,2", dtypes=["bfloat16"])
    assert Tile(**entry["tile"]) == fitting == tiles_of("interpreted", Coding.BFLOAT16)["few"]
    skipped = [line for line in lines if "skips" in line]
    assert len(skipped) == len(candidates(Coding.BFLOAT16)["few"]) - 1
    assert "for few rows: OutOfResources: out of resource: shared memory" in skipped[0]


@needs_triton
@pytest.mark.usefixtures("fake_cuda")
def test_a_run_with_tuning_shows_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreted_kernel()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "CALLS", 1)
    # One tile, so that it takes little time.
    result = run("--tune", "--tokens", "1", "--rounds", "1", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if "float32" in line and "few" in line)
    assert line.split() == ["float32", "few", "16", "64", "8", "4", "1"]
    for words in ("Fake", "read_gb_per_s", "vLLM is not installed here"):
        assert words in result.stdout
    assert "batched" not in result.stdout
    assert (tmp_path / "eaas/tiles/interpreted.json").is_file()

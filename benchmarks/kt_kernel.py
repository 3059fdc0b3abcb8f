"""Measure the compiled expert kernel beside KTransformers' kt-kernel: the same weights, batches and threads.

Calls take turns, ours, theirs, ours, each with other experts, so that no cache holds their weights. A row
has medians, the median of the rounds' ratios (theirs by ours: above 1, ours is faster), the ratio of the
shortest calls, and how far the answers are apart. kt-kernel quantises int8 and int4 itself, from bfloat16, a
scale for each channel.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from benchmarks.harness.entrants import ROOT
from eaas.cores import usable_cores
from eaas.errors import ClusterError, ConfigError
from eaas_cli.bench.command import command, end_on_sigterm, figure, ratio, say, show
from eaas_cli.bench.experts.places import Cpu
from eaas_cli.bench.experts.plan import Plan, Shape, make_plan
from eaas_cli.bench.experts.source import Batch, Batches, source_form, spec_of
from eaas_cli.bench.machine import BusyElsewhere, describe_machine
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows
from eaas_cli.errors import exit_with_one_line
from expert_server.kernels.kernel import ExpertKernel
from expert_server.kernels.matrices import Matrix, rows_of
from expert_server.kernels.quantize import QUANTIZED
from expert_server.kernels.random_matrix import random_matrix
from expert_server.weights.weights import ExpertWeights

# Formats that both have.
_BACKENDS = {
    "bfloat16": "AMXBF16_MOE",
    "int8": "AMXInt8_MOE",
    "int4": "AMXInt4_MOE",
    "fp8": "AMXFP8_MOE",
    "mxfp4": "AMXFP4_KGroup_MOE",
    "int4-g32": "AMXInt4_KGroup_MOE",
}
_UNCOUNTED = 2
# Its threads spin after a call.
_PAUSE_S = 0.06


def main(
    kt_python: Annotated[Path, typer.Option(help="Python of an environment with kt-kernel.")],
    shape: Annotated[
        list[str], typer.Option(metavar="H,I,E,K", help="Experts of a layer. Repeatable.")
    ] = ["1024,512,64,8"],  # noqa: B006
    tokens: Annotated[str, typer.Option(metavar="T,...", help="Batch sizes.")] = "1,8,64,512",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Stored weights. Repeatable.", show_default="all")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Of each side; 0: one per core.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each side.")] = 15,
    as_json: Json = False,
) -> None:
    """Measure the compiled expert kernel beside KTransformers' kt-kernel."""
    end_on_sigterm()
    if not kt_python.is_file():
        raise ConfigError(f"--kt-python {kt_python}: not there; install kt-kernel and torch in it")
    cores = threads or usable_cores()
    names = dtype or list(_BACKENDS)
    plan = make_plan(shapes=shape, tokens=tokens, dtypes=names, rounds=rounds, threads=cores)
    torch.set_num_threads(1)
    elsewhere = BusyElsewhere()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for each in plan.shapes:
        for name in plan.dtypes:
            say(f"{each} {name}")
            try:
                rows += _cells(kt_python, plan, each, name)
            except ClusterError as error:
                skipped.append({"shape": str(each), "dtype": name, "reason": str(error)})
    machine = describe_machine() | {"busy_cores_elsewhere": elsewhere.cores(), "threads": cores}
    show({"machine": machine, "rows": rows, "skipped": skipped}, as_json, _report)


def _cells(python: Path, plan: Plan, shape: Shape, dtype: str) -> Iterator[dict[str, Any]]:
    """Measure a format of a shape; yield a row for each batch size. Raises ClusterError: kt-kernel ended."""
    place = Cpu(plan.threads)
    kernel = place.kernels["native"]([source_form(shape)], spec_of(dtype, plan.threads))
    batches = Batches(shape, torch.bfloat16, max(plan.tokens))
    with (
        tempfile.TemporaryDirectory(prefix="eaas-kt-") as folder,
        closing(kernel),
        _kt_kernel(python, plan, shape, dtype, Path(folder), _load(kernel, shape, dtype)) as theirs,
    ):
        for tokens in plan.tokens:
            took: list[tuple[float, float]] = []
            differences = []
            for seed in range(plan.rounds + _UNCOUNTED):
                batch = batches.get(tokens, seed)
                time.sleep(_PAUSE_S)
                ours_s, ours_TH = place.timed(partial(place.compute, kernel, batch))
                theirs_s, theirs_TH = theirs(batch)
                took.append((ours_s, theirs_s))
                differences.append(float((theirs_TH - ours_TH).norm() / ours_TH.norm()))
            ours, other = zip(*took[_UNCOUNTED:], strict=True)
            yield {
                "shape": str(shape),
                "dtype": dtype,
                "tokens": tokens,
                "ms": figure(1e3 * median(ours)),
                "kt_kernel_ms": figure(1e3 * median(other)),
                "ratio": ratio(other, ours),
                "least_ratio": figure(min(other) / min(ours)),
                "difference": figure(median(differences)),
            }


def _load(kernel: ExpertKernel, shape: Shape, dtype: str) -> dict[str, torch.Tensor]:
    """Load random experts; return all as kt-kernel reads them: codes, and scales of channels or blocks."""
    stored, rng = spec_of(dtype, 1).stored, torch.Generator().manual_seed(1)
    sizes = {"gate_up": (2 * shape.intermediate, shape.hidden)}
    sizes["down"] = shape.hidden, shape.intermediate
    tensors: dict[str, torch.Tensor] = {}
    stacks: list[Matrix] = []
    for name, (outputs, inputs) in sizes.items():
        channels = shape.num_experts * outputs
        if stored is None:
            tensors[name] = torch.randn(channels, inputs, generator=rng).div(inputs**0.5).bfloat16()
            stacks.append(tensors[name])
            continue
        matrix = random_matrix(stored, channels, inputs, rng)
        # The channels of a block have one scale.
        rows = stored.format.block[0]
        scales = matrix.scales[::rows].contiguous()
        stacks.append(replace(matrix, scales=scales.repeat_interleave(rows, 0)[:channels]))
        tensors[name] = matrix.codes
        if stored.format.has_exponents:
            scales = (scales.to(torch.int16) << 7).view(torch.bfloat16)
        tensors[f"{name}.scales"] = scales if rows > 1 else scales.bfloat16()
    for number in range(shape.num_experts):
        up, down = (
            rows_of(stack, slice(number * outputs, (number + 1) * outputs))
            for stack, (outputs, _) in zip(stacks, sizes.values(), strict=True)
        )
        kernel.load(0, number, ExpertWeights(up, down))
    return {
        name: each.reshape(shape.num_experts, -1, each.shape[1]) for name, each in tensors.items()
    }


@contextmanager
def _kt_kernel(
    python: Path,
    plan: Plan,
    shape: Shape,
    dtype: str,
    folder: Path,
    experts: dict[str, torch.Tensor],
) -> Iterator[Callable[[Batch], tuple[float, torch.Tensor]]]:
    """Start kt-kernel on these experts; yield what computes a batch and times it."""
    stored = spec_of(dtype, 1).stored
    layer = {
        "sizes": (shape.num_experts, shape.hidden, shape.intermediate, shape.top_k),
        "threads": plan.threads,
        # Some backends want a multiple of 32.
        "tokens": -(-max(plan.tokens) // 32) * 32,
        "backend": _BACKENDS[dtype],
        "group": stored.group if stored else 0,
        "bits": stored.format.bits if stored else 0,
        "quantises": dtype in QUANTIZED,
    }
    save_file(experts, folder / "experts.safetensors")
    words = [str(python), "-m", "benchmarks.harness.kt_worker", str(folder), json.dumps(layer)]
    log, pipe = folder / "log", subprocess.PIPE
    with (
        log.open("w") as errors,
        subprocess.Popen(
            words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        commands, answers = child.stdin, child.stdout

        def answer() -> str:
            line = answers.readline()
            if not line:
                last = "".join(log.read_text().splitlines(keepends=True)[-2:])
                raise ClusterError(f"kt-kernel ended with {child.wait()}: {last}")
            return line

        def compute(batch: Batch) -> tuple[float, torch.Tensor]:
            tensors = {"x": batch.x_TH, "ids": batch.ids_TK, "scores": batch.scores_TK}
            contiguous = {name: each.contiguous() for name, each in tensors.items()}
            save_file(contiguous, folder / "batch.safetensors")
            print(file=commands, flush=True)
            return float(answer()), load_file(folder / "answer.safetensors")["out"].float()

        try:
            answer()
            yield compute
        finally:
            child.kill()


def _report(document: dict[str, Any]) -> None:
    print_figures(document["machine"])
    print_rows(document["rows"])
    print_rows(document["skipped"], title="skipped")


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)

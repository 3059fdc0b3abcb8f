"""Runs `eaas bench experts` in the process of the command, and builds its document."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.experts.limits import Gauge, Limits, Speed, limit, stored_bytes
from eaas_cli.bench.experts.places import Compute, Cpu, Cuda
from eaas_cli.bench.experts.plan import Plan, Shape, compute_dtype
from eaas_cli.bench.experts.rows import Sample, kernel_row
from eaas_cli.bench.experts.source import (
    Batch,
    Batches,
    Source,
    load_experts,
    source_form,
    spec_of,
)
from eaas_cli.bench.experts.tune import refuse_weights, tune
from eaas_cli.bench.machine import (
    BusyElsewhere,
    instruction_sets,
    last_level_cache_bytes,
    processor,
)
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.kernels.kernel import ExpertKernel, UnsupportedError

__all__ = ["Bench", "affordable_rounds", "bench_experts"]

# Number of tokens at the start of every batch whose answers are computed in float64 for comparison.
_EXACT_TOKENS = 4
# Time limit of a cell (one batch size of a layer). Slow cells have fewer rounds, at least three for a median.
_CELL_S = 30.0
_LEAST_ROUNDS = 3
# Below this ratio of multiply time to read time, the multiply speed is not measured at each call.
_NEAR = 0.5
# Above it, the multiply speed is measured around each call, for this time or, if longer, this share of it.
_MULTIPLY_S, _MULTIPLY_SHARE = 0.04, 0.1

# (dtype of the weights, kernel) of a kernel; ("", name) of a baseline.
_Name = tuple[str, str]


def bench_experts(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure kernels, the machine's limits and baselines in turn, in this process.

    Sets torch's number of threads.

    Returns:
        The document of `eaas bench experts --json`; figures are medians over the rounds.

    Raises:
        ConfigError: There is no such device, or nothing could be measured.
    """
    if plan.device == "cpu":
        place = Cpu(plan.threads)
    else:
        refuse_weights("--device cuda", plan)  # Before a GPU is looked for.
        place = Cuda()
    torch.set_num_threads(plan.threads)
    elsewhere = BusyElsewhere()
    tuned = {"tuned": tune(plan, place, say)} if plan.tune else {}
    say("the machine's limits")
    read = Gauge.of_reads(place)
    computes: dict[str, list[str]] = {}
    for dtype in plan.dtypes:
        computes.setdefault(compute_dtype(dtype), []).append(dtype)
    gauges = {name: Gauge.of_products(place, getattr(torch, name)) for name in computes}
    bench = Bench(plan, place, say)
    for shape in plan.shapes:
        for name, dtypes in computes.items():
            bench.layer(shape, dtypes, Limits(getattr(torch, name), read, gauges[name]))
    if not bench.rows:
        reasons = (f"{entry['what']}: {entry['reason']}" for entry in bench.skipped)
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(reasons))}")
    return {
        "machine": _machine(plan, read, gauges)
        | place.describe()
        | {"busy_cores_elsewhere": elsewhere.cores()},
        "rounds": plan.rounds,
        "rows": bench.rows,
        "auto": bench.auto,
        **tuned,
        "skipped": bench.skipped,
    }


def _machine(plan: Plan, read: Gauge, multiply: Mapping[str, Gauge]) -> dict[str, Any]:
    import transformers

    return {
        "processor": processor(),
        "instruction_sets": instruction_sets(),
        "cores": usable_cores(),
        "threads": plan.threads,
        "last_level_cache_mb": last_level_cache_bytes() >> 20,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read_gb_per_s": read.document(1e9),
        "gemm_tflops": {name: gauge.document(1e12) for name, gauge in multiply.items()},
    }


class _Entrants(NamedTuple):
    """The kernels that are measured with one dtype of the stored weights.

    Attributes:
        kernels: Kernels by name, without experts at first. The caller closes them.
        picked: Choice of `auto`, if `auto` takes part and finds one.
    """

    kernels: dict[str, ExpertKernel]
    picked: str | None


class Bench:
    """Measures MoE layers one after another.

    Attributes:
        rows: Of the document: one per shape, dtype, number of tokens and kernel.
        auto: Choices of `auto` for each shape and dtype, with the candidates.
        skipped: Combinations that were not measured, and why.
        most_copied_bytes: `batched_mm` is skipped if it would copy more.
    """

    most_copied_bytes = 4 << 30

    def __init__(self, plan: Plan, place: Cpu, say: Callable[[str], None]) -> None:
        self._plan, self._place, self._say = plan, place, say
        self.rows: list[dict[str, Any]] = []
        self.auto: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []

    def layer(self, shape: Shape, dtypes: Iterable[str], limits: Limits) -> None:
        """Measure all implementations on one layer of random weights, add their rows, and free its memory.

        Args:
            dtypes: Dtypes of the stored weights that share a dtype of products; measured in the same rounds.
            limits: Limits of the place for that dtype of products.
        """
        plan, place = self._plan, self._place
        compute = str(limits.dtype).removeprefix("torch.")
        with ExitStack() as stack:
            entrants: dict[str, _Entrants] = {}
            for dtype in dtypes:
                entrants[dtype] = self._entrants(shape, dtype)
                for kernel in entrants[dtype].kernels.values():
                    stack.callback(kernel.close)
            if not self._fits(shape, limits.dtype, entrants):
                return
            self._say(f"{shape} {compute}: random weights")
            source = Source(shape, limits.dtype)
            computes: dict[_Name, Compute] = {}
            for dtype, found in entrants.items():
                for name, kernel in found.kernels.items():
                    self._say(f"{shape} {dtype}: {name} loads the experts")
                    load_experts(kernel, source, dtype)
                    computes[dtype, name] = partial(place.compute, kernel)
            batches = Batches(shape, limits.dtype, max(*plan.tokens, _EXACT_TOKENS))
            first = batches.get(_EXACT_TOKENS, 0)
            exact = {dtype: source.exact(first, dtype) for dtype in entrants}
            source.move(place.at)
            for name in place.baselines:
                try:
                    computes["", name] = place.baseline(name, source)
                except UnsupportedError as error:
                    self._skip(shape, compute, name, str(error))
            for tokens in plan.tokens:
                self._cell(shape, tokens, batches, exact, entrants, computes, limits)

    def _entrants(self, shape: Shape, dtype: str) -> _Entrants:
        """Create those kernels of the plan that work in this place; record the others as skipped.

        Without named kernels, the reference takes part only if `auto` picks it: it is as fast as
        transformers' `eager`.
        """
        plan, place, form = self._plan, self._place, source_form(shape)
        spec = spec_of(dtype, plan.threads)
        shown = plan.kernels or place.kernels.keys() - {"reference"}
        picked = None
        if place.has_auto and not plan.kernels:
            self._say(f"{shape} {dtype}: auto tries the kernels")
            sizes = ExpertSizes(shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
            try:
                choice = choose_kernel([form], spec, sizes)
            except ConfigError as error:
                self._skip(shape, dtype, "auto", str(error))
            else:
                choice.kernel.close()
                picked = choice.kernel.name
                named = {"shape": str(shape), "dtype": dtype, "picked": picked}
                self.auto.append(named | {"passed_over": dict(choice.passed_over)})
        kernels = {}
        for name, make in place.kernels.items():
            if name in shown or name == picked:
                try:
                    kernels[name] = make([form], spec)
                except UnsupportedError as error:
                    self._skip(shape, dtype, name, str(error))
        return _Entrants(kernels, picked)

    def _fits(self, shape: Shape, compute: torch.dtype, entrants: Mapping[str, _Entrants]) -> bool:
        """Whether there are kernels, and memory for all their and the baselines' weights and calls."""
        held = [
            stored_bytes(shape, dtype) for dtype, found in entrants.items() for _ in found.kernels
        ]
        if not held:
            return False
        weights = shape.num_experts * (sum(held) + shape.expert_size * compute.itemsize)
        pairs = max(self._plan.tokens) * shape.top_k
        # Each kernel keeps scratch space for the token-expert pairs, float32 at worst.
        scratch = len(held) * pairs * (shape.hidden + shape.intermediate) * 4
        # transformers keeps per pair: input, gate and up, their product, output with and without the score.
        theirs = pairs * (4 * shape.hidden + 3 * shape.intermediate) * compute.itemsize
        copied = (_copied_bytes(shape, compute, tokens) for tokens in self._plan.tokens)
        most = max([theirs, *(size for size in copied if size <= self.most_copied_bytes)])
        needed, available = weights + scratch + most, self._place.free_bytes()
        if needed <= available:
            return True
        lack = (
            f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free: "
            "name fewer kernels (--kernel) or fewer --dtype at a time"
        )
        for dtype, found in entrants.items():
            for name in found.kernels:
                self._skip(shape, dtype, name, lack)
        return False

    def _cell(
        self,
        shape: Shape,
        tokens: int,
        batches: Batches,
        exact: Mapping[str, torch.Tensor],
        entrants: Mapping[str, _Entrants],
        computes: Mapping[_Name, Compute],
        limits: Limits,
    ) -> None:
        """Check the answers and measure the time of one batch size of a layer; add a row for each kernel.

        Args:
            exact: Answer to the first tokens of the batch of seed 0, float64, by dtype.
            entrants: Kernels that have loaded the experts, by dtype.
            computes: Those kernels, and the baselines.
        """
        plan, place = self._plan, self._place
        compute = str(limits.dtype).removeprefix("torch.")
        copied = _copied_bytes(shape, limits.dtype, tokens)
        if copied > self.most_copied_bytes and ("", "batched_mm") in computes:
            computes = {name: c for name, c in computes.items() if name != ("", "batched_mm")}
            reason = f"it would copy {copied / 1e9:.1f} GB of weights in each call"
            self._skip(shape, compute, "batched_mm", reason, tokens=tokens)

        # Step 1: warm up and check the answers.
        batch = batches.get(tokens, 0).to(place.at)
        seconds: dict[_Name, float] = {}
        errors: dict[_Name, float] = {}
        for name, call in computes.items():
            for _ in range(place.warm_ups):
                call(batch)
            seconds[name], answer_TH = place.timed(partial(call, batch))
            if name[0] in exact:
                exact_TH = exact[name[0]][:tokens]
                off_TH = answer_TH[:_EXACT_TOKENS].cpu().double() - exact_TH
                errors[name] = float(off_TH.norm() / exact_TH.norm())

        # Step 2: measure.
        rounds = affordable_rounds(plan.rounds, sum(seconds.values()), _CELL_S)
        self._say(f"{shape} {compute} T={tokens}: {len(computes)} implementations, {rounds} rounds")
        typical = limits.typical()
        least = [limit(shape, dtype, tokens, batch.active, typical) for dtype in entrants]
        is_near = any(one.compute_s > _NEAR * one.memory_s for one in least)
        samples = self._in_turn(
            computes,
            (batches.get(tokens, seed).to(place.at) for seed in range(1, rounds + 1)),
            limits,
            max(_MULTIPLY_S, _MULTIPLY_SHARE * median(seconds.values())) if is_near else 0,
        )

        # Step 3: report.
        baselines = {name: samples.get(("", name)) for name in place.baselines}
        pooled = [sample for of in samples.values() for sample in of]
        typical = Speed(*(median(of) for of in zip(*(s.speed for s in pooled), strict=True)))
        active = median(sample.active for sample in pooled)
        for dtype, found in entrants.items():
            bound = limit(shape, dtype, tokens, active, typical).bound
            self.rows += [
                kernel_row(
                    *(shape, tokens, dtype, name, samples[dtype, name]),
                    *(baselines, bound, errors[dtype, name]),
                )
                | {"auto": name == found.picked}
                for name in found.kernels
            ]

    def _in_turn(
        self,
        computes: Mapping[_Name, Compute],
        batches: Iterator[Batch],
        limits: Limits,
        multiply_s: float,
    ) -> dict[_Name, list[Sample]]:
        """Run one round per batch: every implementation once, in rotating order.

        Each call is between two measurements of the machine's speed.
        """
        names, place = list(computes), self._place
        samples: dict[_Name, list[Sample]] = {name: [] for name in names}
        before = limits.measure(multiply_s)
        for number, batch in enumerate(batches):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                place.settle()
                seconds, _ = place.timed(partial(computes[name], batch))
                after = limits.measure(multiply_s)
                # Use the mean. When the speed varies, even the reader itself stays below the maximum.
                read, multiply = (sum(pair) / 2 for pair in zip(before, after, strict=True))
                samples[name].append(Sample(seconds, Speed(read, multiply), batch.active))
                before = after
        return samples

    def _skip(self, shape: Shape, dtype: str, what: str, reason: str, **only: int) -> None:
        """Record a skipped combination; `only`: the batch size, if only that one is skipped."""
        entry = {"shape": str(shape), "dtype": dtype, "what": what, "reason": reason}
        self.skipped.append(entry | only)


def affordable_rounds(wanted: int, round_s: float, budget_s: float) -> int:
    """Number of rounds of `round_s` that fit `budget_s`; three if fewer fit, but at most `wanted`."""
    return min(wanted, max(_LEAST_ROUNDS, int(budget_s / round_s)))


def _copied_bytes(shape: Shape, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of weights that transformers' `batched_mm` copies in a call: an expert per token-expert pair."""
    return tokens * shape.top_k * shape.expert_size * dtype.itemsize

"""Choice of the kernel: the first that computes correctly on this CPU and that no other clearly beats."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import torch

from eaas.errors import ConfigError
from eaas.log import get_logger
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.registry import KERNEL_NAMES, create_kernel
from expert_server.kernels.trial import ROWS, ExpertSizes, Trial, TrialBatch
from expert_server.weights.weights import ExpertForm

__all__ = ["Choice", "ExpertSizes", "choose_kernel"]

_log = get_logger(__name__)

# Relative error. Both sides use the same (quantised) weights, so only rounding differs.
_BOUND, _BFLOAT16_BOUND = 1e-5, 1e-2
# A kernel replaces an earlier one of KERNEL_NAMES only if it is clearly faster, so that servers that measure
# at once on a busy machine agree.
_CLEARLY_FASTER = 0.9
_MIN_ROUNDS, _MAX_ROUNDS, _MEASURE_S = 3, 20, 0.3
_PAUSE_S = 0.02


@dataclass(frozen=True, eq=False)
class Choice:
    """The chosen kernel, and why.

    Attributes:
        kernel: Holds no expert yet. The caller closes it.
        seconds: Kernel -> time of a call at 1, 8 and 64 rows per expert; empty if there was only one
            candidate.
        passed_over: Kernel -> why it cannot serve.
    """

    kernel: ExpertKernel
    seconds: Mapping[str, tuple[float, ...]]
    passed_over: Mapping[str, str]


def choose_kernel(
    forms: Sequence[ExpertForm], spec: KernelSpec, sizes: ExpertSizes, wanted: str = "auto"
) -> Choice:
    """Choose the kernel to serve with, and log the reason.

    Each kernel is checked against the reference in float64. If several pass, they are timed. The reference is
    the last resort and is never timed.

    Call it with torch's threads set to `spec.threads`. It takes 0.1 s for small experts and a few seconds for
    those of 88 MB, and meanwhile the memory of eight experts.

    Args:
        forms: How the experts of each MoE layer compute; the first layer's are tried.
        spec: What to compute with.
        sizes: Of the experts.
        wanted: One of KERNEL_NAMES, or "auto": any.

    Raises:
        ConfigError: The wanted kernel cannot serve, or no kernel supports this quantisation.
    """
    trial = Trial(forms[0], spec, sizes)
    usable: list[ExpertKernel] = []
    passed_over: dict[str, str] = {}
    for name in _candidates(wanted, spec):
        if name == "reference" and usable:
            break
        try:
            usable.append(_try_out(name, forms, spec, trial))
        except UnsupportedError as error:
            passed_over[name] = str(error)
    if not usable:
        raise ConfigError(_explain(wanted, spec, passed_over))
    seconds: dict[str, tuple[float, ...]] = {}
    if len(usable) > 1:
        del trial.experts  # The kernels have packed copies.
        seconds = _measure(usable, trial.batches)
    name = fastest(seconds) if seconds else usable[0].name
    for kernel in usable:
        if kernel.name == name:
            chosen = kernel
        else:
            kernel.close()
    for expert in range(trial.count):
        chosen.unload(0, expert)
    _log.info("%s", _reason(name, seconds, passed_over))
    return Choice(chosen, seconds, passed_over)


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """The first kernel that no other clearly beats.

    Args:
        seconds: Kernel -> times of the same calls; in order of preference.
    """
    best = [min(times) for times in zip(*seconds.values(), strict=True)]
    # Step 1: a kernel's score is its time relative to the best one's, over all calls.
    scores = {
        name: geometric_mean(time / least for time, least in zip(times, best, strict=True))
        for name, times in seconds.items()
    }
    # Step 2: the first one that no other clearly beats.
    least = min(scores.values())
    return next(name for name, score in scores.items() if least > _CLEARLY_FASTER * score)


def _candidates(wanted: str, spec: KernelSpec) -> Sequence[str]:
    if wanted != "auto":
        return (wanted,)
    # The reference has the error of quantised weights but saves no memory: use it on request only.
    is_plain = spec.quantization is Quantization.NONE
    return [name for name in KERNEL_NAMES if is_plain or name != "reference"]


def _try_out(
    name: str, forms: Sequence[ExpertForm], spec: KernelSpec, trial: Trial
) -> ExpertKernel:
    """Create a kernel, load the trial's experts and check its results; raises UnsupportedError on failure."""
    kernel = None
    try:
        kernel = create_kernel(name, forms, spec)
        if name == "reference":
            return kernel
        for expert, weights in enumerate(trial.experts):
            kernel.load(0, expert, weights)
        errors = [batch.error(kernel) for batch in trial.batches]
    except Exception as error:
        if kernel is not None:
            kernel.close()
        if isinstance(error, UnsupportedError):
            raise
        # A library may fail on this machine in any way; another kernel can serve.
        _log.warning("kernel %s fails on this machine", name, exc_info=True)
        raise UnsupportedError(f"it fails: {' '.join(str(error).split())}") from error
    bound = _BFLOAT16_BOUND if spec.dtype is torch.bfloat16 else _BOUND
    wrong = [error for error in errors if not error <= bound]  # NaN is not
    if not wrong:
        return kernel
    kernel.close()
    what = f"its results are wrong: relative error {wrong[0]:.1e}, more than {bound:.0e}"
    _log.warning("kernel %s: %s", name, what)
    raise UnsupportedError(what)


def _measure(
    kernels: Sequence[ExpertKernel], batches: Sequence[TrialBatch]
) -> dict[str, tuple[float, ...]]:
    """Kernel -> least time of each batch. The kernels take turns, so that disturbances affect all of them."""
    seconds = {kernel.name: [math.inf] * len(batches) for kernel in kernels}
    started = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        if done >= _MIN_ROUNDS and time.perf_counter() - started > _MEASURE_S:
            break
        for kernel in kernels:
            # OpenMP's threads spin on after the previous kernel's calls: let them stop first.
            time.sleep(_PAUSE_S if kernel.spec.threads > 1 else 0.0)
            for place, batch in enumerate(batches):
                before = time.perf_counter()
                batch.compute(kernel)
                took = time.perf_counter() - before
                seconds[kernel.name][place] = min(seconds[kernel.name][place], took)
    return {name: tuple(times) for name, times in seconds.items()}


def _reason(
    name: str, seconds: Mapping[str, Sequence[float]], passed_over: Mapping[str, str]
) -> str:
    """The choice in one line."""
    parts = [
        f"{kernel} {', '.join(f'{1e3 * took:.3g}' for took in times)} ms"
        for kernel, times in seconds.items()
    ]
    rows = ", ".join(map(str, ROWS))
    measured = f" ({'; '.join(parts)} with {rows} rows per expert)" if parts else ""
    return "; ".join(
        [f"kernel {name}{measured}", *(f"not {other}: {why}" for other, why in passed_over.items())]
    )


def _explain(wanted: str, spec: KernelSpec, passed_over: Mapping[str, str]) -> str:
    remedies = ["--kernel auto"] if wanted != "auto" else []
    remedies += ["--quantization none"] if spec.quantization is not Quantization.NONE else []
    why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    weights = "" if spec.quantization is Quantization.NONE else f" with {spec.quantization} weights"
    return (
        f"expert_server.kernel {wanted}: cannot serve this model{weights} here ({why}); "
        f"give {' or '.join(remedies)}"
    )

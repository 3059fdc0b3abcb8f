"""The expert kernels that take part in `eaas bench experts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eaas.errors import ConfigError
from eaas_cli.bench.experts.place import Place
from eaas_cli.bench.experts.plan import AUTO, Plan, Shape, compute_dtype
from eaas_cli.bench.experts.rows import Findings
from eaas_cli.bench.experts.stored import STORED
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, UnsupportedError
from expert_server.weights.weights import ExpertForm

__all__ = ["Entrants", "find_entrants", "spec_of"]


@dataclass(frozen=True, eq=False)
class Entrants:
    """The kernels that are measured with one dtype of the stored weights.

    Attributes:
        kernels: Kernels without experts, by name. The caller closes them.
        shown: Kernels with rows of their own.
        picked: Choice of `auto`, if `auto` takes part and finds one.
    """

    kernels: dict[str, ExpertKernel]
    shown: frozenset[str]
    picked: str | None


def find_entrants(
    plan: Plan, place: Place, shape: Shape, dtype: str, form: ExpertForm, findings: Findings
) -> Entrants:
    """Create those kernels of a plan that work in this place; record the others as skipped.

    Without named kernels, the reference takes part only if `auto` picks it: it is as fast as
    transformers' `eager`.
    """
    spec = spec_of(dtype, plan.threads)
    shown = {name for name in plan.kernels if name != AUTO} or place.kernels.keys() - {"reference"}
    picked = None
    if place.has_auto and (AUTO in plan.kernels or not plan.kernels):
        findings.say(f"{shape} {dtype}: auto tries the kernels")
        picked = _pick(shape, dtype, form, spec, findings)
    kernels = {}
    for name, make in place.kernels.items():
        if name in shown or name == picked:
            try:
                kernels[name] = make([form], spec)
            except UnsupportedError as error:
                findings.skip(shape, dtype, name, str(error))
    return Entrants(kernels, frozenset(shown), picked)


def spec_of(dtype: str, threads: int) -> KernelSpec:
    """Return what a kernel of a dtype of the stored weights computes with."""
    quantization = Quantization(dtype) if dtype in ("int8", "int4") else Quantization.NONE
    compute = getattr(torch, compute_dtype(dtype))
    return KernelSpec(compute, quantization, threads, STORED.get(dtype))


def _pick(
    shape: Shape, dtype: str, form: ExpertForm, spec: KernelSpec, findings: Findings
) -> str | None:
    sizes = ExpertSizes(shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
    try:
        choice = choose_kernel([form], spec, sizes)
    except ConfigError as error:
        findings.skip(shape, dtype, AUTO, str(error))
        return None
    choice.kernel.close()
    findings.auto.append(
        {
            "shape": str(shape),
            "dtype": dtype,
            "picked": choice.kernel.name,
            "passed_over": dict(choice.passed_over),
        }
    )
    return choice.kernel.name

"""Chooses an expert server's kernel at start: the compiled one, if it computes this model on this CPU.

Kernel `triton`, for a GPU, is imported only if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eaas.errors import ConfigError
from eaas.log import get_logger, one_line
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.native import NativeKernel
from expert_server.kernels.on_device import CPU, kernel_on
from expert_server.kernels.reference import ReferenceKernel
from expert_server.kernels.trial import ExpertSizes, trial_error
from expert_server.weights.weights import ExpertForm

__all__ = ["KERNELS", "ON_REQUEST", "Choice", "ExpertSizes", "choose_kernel"]

_log = get_logger(__name__)


def _triton(forms: Sequence[ExpertForm], spec: KernelSpec, device: str = "cuda") -> ExpertKernel:
    from expert_server.kernels.gpu.device import find_device
    from expert_server.kernels.gpu.kernel import TritonKernel

    return TritonKernel(forms, spec, find_device(device))


# Those that `auto` tries, in order of preference.
KERNELS: dict[str, type[ExpertKernel]] = {"native": NativeKernel, "reference": ReferenceKernel}
# Those of a GPU: (forms, spec, device).
ON_REQUEST: dict[str, Callable[..., ExpertKernel]] = {"triton": _triton}
# Relative error. Both sides use the same (quantised) weights, so only rounding differs.
_BOUND, _BFLOAT16_BOUND = 1e-5, 1e-2


@dataclass(frozen=True, eq=False)
class Choice:
    """The chosen kernel, and why others were not chosen.

    Attributes:
        kernel: Holds no expert yet. The caller closes it.
        passed_over: Kernel -> why it cannot serve.
    """

    kernel: ExpertKernel
    passed_over: Mapping[str, str]


def choose_kernel(
    forms: Sequence[ExpertForm],
    spec: KernelSpec,
    sizes: ExpertSizes,
    wanted: str = "auto",
    device: str = CPU,
) -> Choice:
    """Return the first of KERNELS that computes this model correctly here, or the wanted kernel; log why.

    Each kernel is checked against the reference in float64, which takes 0.1 s for small experts and a few
    seconds for those of 88 MB.

    Args:
        forms: How the experts of each MoE layer compute; the first layer's are tried.
        spec: What to compute with.
        sizes: Sizes of the experts.
        wanted: One of KERNELS or ON_REQUEST, or "auto": any of KERNELS, on a GPU `triton`.
        device: `expert_server.device`.

    Raises:
        ConfigError: The wanted kernel cannot serve, no kernel supports this quantisation, or the device is
            not there.
    """
    wanted = kernel_on(device, wanted)
    passed_over: dict[str, str] = {}
    for name in _candidates(wanted, spec):
        try:
            kernel = _try_out(name, forms, spec, sizes, device)
        except UnsupportedError as error:
            passed_over[name] = str(error)
            continue
        reasons = [f"not {other}: {why}" for other, why in passed_over.items()]
        _log.info("%s", "; ".join([f"kernel {name}", *reasons]))
        return Choice(kernel, passed_over)
    raise ConfigError(_explain(wanted, spec, passed_over, device))


def _candidates(wanted: str, spec: KernelSpec) -> Sequence[str]:
    if wanted != "auto":
        return (wanted,)
    # The reference has the error of quantised weights but saves no memory: use it on request only.
    is_plain = spec.quantization is Quantization.NONE and spec.stored is None
    return [name for name in KERNELS if is_plain or name != "reference"]


def _try_out(
    name: str, forms: Sequence[ExpertForm], spec: KernelSpec, sizes: ExpertSizes, device: str
) -> ExpertKernel:
    """Create a kernel and check its results on trial experts; UnsupportedError: another may serve."""
    kernel = None
    try:
        kernel = (
            KERNELS[name](forms, spec) if name in KERNELS else ON_REQUEST[name](forms, spec, device)
        )
        if name == "reference":
            return kernel
        found = trial_error(kernel, forms[0], spec, sizes)
    except Exception as error:
        if kernel is not None:
            kernel.close()
        if isinstance(error, UnsupportedError):
            raise
        # A kernel may fail on this machine in any way; another one can serve.
        _log.warning("kernel %s fails on this machine", name, exc_info=True)
        raise UnsupportedError(f"it fails: {one_line(error)}") from error
    bound = _BFLOAT16_BOUND if spec.dtype is torch.bfloat16 else _BOUND
    if found <= bound:  # NaN is not
        return kernel
    kernel.close()
    what = f"its results are wrong: relative error {found:.1e}, more than {bound:.0e}"
    _log.warning("kernel %s: %s", name, what)
    raise UnsupportedError(what)


def _explain(wanted: str, spec: KernelSpec, passed_over: Mapping[str, str], device: str) -> str:
    if wanted in ON_REQUEST:
        remedies = ["--kernel auto" if device == CPU else "--device cpu"]
    elif spec.stored is not None:
        remedies = ["--kernel reference (which dequantises the weights)"]
    else:
        remedies = ["--kernel auto"] if wanted != "auto" else []
        remedies += ["--quantization none"] if spec.quantization is not Quantization.NONE else []
    why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    quantized = spec.stored or spec.quantization
    weights = "" if quantized is Quantization.NONE else f" with {quantized} weights"
    return (
        f"expert_server.kernel {wanted}: cannot serve this model{weights} here ({why}); "
        f"give {' or '.join(remedies)}"
    )

"""The kernels by name, imported on demand: a kernel that fails to import does not affect others."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from expert_server.kernels.kernel import ExpertKernel, KernelSpec, UnsupportedError
from expert_server.weights.weights import ExpertForm

__all__ = ["KERNEL_NAMES", "create_kernel"]

# In order of preference: of two about equally fast kernels, the first is chosen.
KERNEL_NAMES: tuple[str, ...] = ("native", "packed", "zentorch", "reference")
_CLASSES = {
    "native": ("expert_server.kernels.native", "NativeKernel"),
    "packed": ("expert_server.kernels.packed", "PackedKernel"),
    "zentorch": ("expert_server.kernels.zentorch", "ZentorchKernel"),
    "reference": ("expert_server.kernels.reference", "ReferenceKernel"),
}
_INSTALL = {
    "zentorch": "install the extra: pip install 'expert-as-a-service[zentorch]'",
}


def create_kernel(name: str, forms: Sequence[ExpertForm], spec: KernelSpec) -> ExpertKernel:
    """Create an empty kernel.

    Args:
        name: One of KERNEL_NAMES.
        forms: How the experts of each MoE layer compute.
        spec: What to compute with.

    Raises:
        UnsupportedError: It is not installed, or cannot compute this on this CPU.
    """
    module, class_name = _CLASSES[name]
    try:
        kernel: type[ExpertKernel] = getattr(importlib.import_module(module), class_name)
    except (ImportError, OSError) as error:
        remedy = _INSTALL.get(name, "install this package again")
        raise UnsupportedError(f"it is not installed ({error}): {remedy}") from error
    return kernel(forms, spec)

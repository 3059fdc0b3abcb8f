"""The computation of one layer's experts; every kernel answers to the same interface."""

from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization
from expert_server.kernels.reference import ReferenceKernel

__all__ = ["ExpertKernel", "KernelSpec", "Quantization", "ReferenceKernel"]

"""Kernels of an expert server: compute a batch through one layer's experts, behind one interface."""

from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, StoredFormat
from expert_server.kernels.reference import ReferenceKernel

__all__ = ["ExpertKernel", "KernelSpec", "Quantization", "ReferenceKernel", "StoredFormat"]

"""Hugging Face checkpoints: files are validated without torch, and tensors are opened lazily."""

from eaas.checkpoint.files import precheck
from eaas.checkpoint.model import Checkpoint, ExpertTensor
from eaas.checkpoint.quiet import quiet_transformers

__all__ = ["Checkpoint", "ExpertTensor", "precheck", "quiet_transformers"]

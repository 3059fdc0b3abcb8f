"""Hugging Face checkpoints: files are validated without torch, and tensors are opened lazily."""

from eaas.checkpoint.files import precheck, refuse_missing_tokenizer
from eaas.checkpoint.model import Checkpoint, ExpertTensor
from eaas.checkpoint.quiet import quiet_transformers

__all__ = [
    "Checkpoint",
    "ExpertTensor",
    "precheck",
    "quiet_transformers",
    "refuse_missing_tokenizer",
]

"""Hugging Face checkpoints: checked without torch before anything starts, then opened lazily."""

from eaas.checkpoint.files import precheck
from eaas.checkpoint.model import Checkpoint, ExpertTensor
from eaas.checkpoint.quiet import quiet_transformers

__all__ = ["Checkpoint", "ExpertTensor", "precheck", "quiet_transformers"]

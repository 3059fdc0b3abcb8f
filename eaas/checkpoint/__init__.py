"""Hugging Face checkpoints: checked without torch before anything starts, then opened lazily."""

from eaas.checkpoint.files import precheck, precheck_tokenizer
from eaas.checkpoint.model import Checkpoint, ExpertTensor
from eaas.checkpoint.quiet import quiet_transformers

__all__ = ["Checkpoint", "ExpertTensor", "precheck", "precheck_tokenizer", "quiet_transformers"]

"""Formats in which makers publish quantised checkpoints: from stored tensors to quantised matrices.

A module for each `quant_method` of config.json. None of them imports torch before a matrix is read.
"""

from eaas.checkpoint.formats.registry import find_matrices
from eaas.checkpoint.formats.stored import USUAL, StoredFormat, StoredMatrix

__all__ = ["USUAL", "StoredFormat", "StoredMatrix", "find_matrices"]

"""Finds the format of a checkpoint by its `quantization_config`, and the matrices that are stored in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaas.checkpoint.formats.awq import awq_matrices
from eaas.checkpoint.formats.compressed_tensors import compressed_matrices
from eaas.checkpoint.formats.fp8 import fp8_matrices
from eaas.checkpoint.formats.gptq import gptq_matrices
from eaas.checkpoint.formats.mxfp4 import mxfp4_matrices
from eaas.checkpoint.formats.stored import Entry, Reader, StoredMatrix, Unreadable
from eaas.errors import UnsupportedModelError

__all__ = ["find_matrices"]

_READERS: dict[str, Reader] = {
    "fp8": fp8_matrices,
    "mxfp4": mxfp4_matrices,
    "compressed-tensors": compressed_matrices,
    "gptq": gptq_matrices,
    "awq": awq_matrices,
}
_REMEDY = "use another version of the model, or dequantise it with transformers and save it"


def find_matrices(
    file: str, config: Mapping[str, Any], tensors: Mapping[str, Entry]
) -> dict[str, StoredMatrix]:
    """Find the quantised matrices of a checkpoint: name of the weight -> matrix.

    Args:
        file: Names config.json in messages.
        config: Its content.
        tensors: Name -> header entry of every tensor.

    Raises:
        UnsupportedModelError: The format, or the variant of it, is not supported.
    """
    section = _quantization_config(config)
    if section is None:
        return {}
    method = section.get("quant_method")
    if method not in _READERS:
        raise UnsupportedModelError(
            f"{file}: quantised with {method!r}, which is not supported (supported: "
            f"{', '.join(_READERS)}): {_REMEDY}"
        )
    try:
        return {matrix.name: matrix for matrix in _READERS[method](section, tensors)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = error if isinstance(error, Unreadable) else f"{method}: {error!r}"
        raise UnsupportedModelError(f"{file}: {why}: {_REMEDY}") from error


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section of config.json that tells how the weights are stored; None: not quantised."""
    for part in (config, config.get("text_config")):
        section = part.get("quantization_config") if isinstance(part, Mapping) else None
        if section:
            return section if isinstance(section, Mapping) else {}
    # Older releases of compressed-tensors.
    section = config.get("compression_config")
    return section if isinstance(section, Mapping) and section else None

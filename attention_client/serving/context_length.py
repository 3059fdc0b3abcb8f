"""The positions that a model is made for, from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["context_length"]

# Their max_position_embeddings is the extended length already.
_UNSCALED = ("default", "llama3", "longrope")


def context_length(config: Any) -> int | None:
    """Return the most tokens of a sequence, as vLLM derives it; None: the config has no limit.

    YaRN extends `original_max_position_embeddings` by its factor, whatever `max_position_embeddings` says:
    model cards add YaRN to a config and leave the old length there. Other scalings extend
    `max_position_embeddings`. Unlike vLLM, which serves LongRoPE's original length, this is the extended one.

    Args:
        config: transformers' config of a text model, which has every spelling as `rope_parameters`.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    scaled = [
        (rope["original_max_position_embeddings"] if rope["rope_type"] == "yarn" else positions)
        * (rope.get("factor") or 1)
        for rope in _ropes(getattr(config, "rope_parameters", None) or {})
        if rope["rope_type"] not in _UNSCALED
    ]
    return int(max(scaled, default=positions))


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of all layers, or of each type of layers that has its own."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))

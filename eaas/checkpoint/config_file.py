"""Validation of config.json without transformers: its counts, against the tensors, and its architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any

from eaas.checkpoint.text_files import REPAIR, check_kinds
from eaas.errors import CheckpointError, DenseModelError, UnsupportedModelError

__all__ = ["EXPERTS_PER_TOKEN", "NUM_EXPERTS", "SAME_AS", "check_config"]

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields with the number of routed experts; transformers maps most of them with `attribute_map`."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""Fields with the number of experts per token."""

SAME_AS = {"kimi_k2": ("DeepseekV3ForCausalLM", "deepseek_v3")}
"""Checkpoints that bring code for an architecture of transformers, which is not run: their model_type ->
architecture, and its model_type in transformers."""

_LAYERS = "num_hidden_layers"
# Fields that are whole numbers above 0 in every architecture, or lists with one for each layer.
_COUNTS = (
    *("hidden_size", _LAYERS, "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "vocab_size", "max_position_embeddings"),
    *EXPERTS_PER_TOKEN,
)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), (float, NoneType)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, NoneType)),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "sliding_window"), (int, NoneType)
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (int, list, NoneType)),
    "pad_token_id": (int, NoneType),
}
# Settings of rotary embeddings: numbers above 0, numbers of any sign, and lists of numbers above 0.
_ROPE_SIZES = (
    *("rope_theta", "rope_local_base_freq", "factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale"),
)
_ROPE_NUMBERS = ("mscale", "mscale_all_dim")
_ROPE_LISTS = ("short_factor", "long_factor")
_LARGEST = 1e38
_DTYPES = ("float64", "double", "float32", "float", "float16", "half", "bfloat16", None)
_OF_EXPERTS = re.compile(r"((?:^|.*\.)layers\.)\d+\..*(?<!shared_)experts\.")
_EXPERT = re.compile(r"(?:^|\.)layers\.\d+\..*(?<!shared_)experts\.(\d+)\.")


def check_config(place: str, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Check a config's counts and model_type.

    Args:
        place: Names config.json in messages.
        config: Its content.
        tensors: Names of the checkpoint's tensors.

    Raises:
        CheckpointError: A field has the wrong kind; a count is below 1, or does not fit the tensors.
        DenseModelError: There is no expert, or a single one.
        UnsupportedModelError: transformers does not know the architecture.
    """
    model_type = config["model_type"]
    if model_type not in SAME_AS and not _is_known(model_type, "models/auto/*.py"):
        code = " (its own code is not run)" if "auto_map" in config else ""
        raise UnsupportedModelError(
            f"{place}: transformers has no model_type {json.dumps(model_type)[:60]}{code}: "
            "use a model that it knows, or update it"
        )
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, dict) else {})}
    for name in _COUNTS:
        value = text.get(name)
        numbers = value if isinstance(value, list) else [value]
        if value is not None and not all(type(n) is int and n > 0 for n in numbers):
            shown = json.dumps(value)[:40]
            raise CheckpointError(f"{place}: {name} is {shown}, no number above 0: {REPAIR}")
    check_kinds(place, text, _KINDS)
    for name in ("dtype", "torch_dtype"):
        if text.get(name) not in _DTYPES:
            shown = json.dumps(text[name])[:40]
            raise CheckpointError(
                f'{place}: {name} is {shown}, not "bfloat16", "float16" or "float32": {REPAIR}'
            )
    _check_padding(place, text)
    window = text.get("sliding_window")
    if window is not None and window < 1 and text.get("use_sliding_window") is not False:
        raise CheckpointError(
            f"{place}: sliding_window is {window}, no number of tokens: correct or remove it"
        )
    _check_rope_numbers(place, text)
    for settings in _rope_settings(text):
        _check_rope_type(place, settings)
        _check_rope_numbers(place, settings)
    tensors = list(tensors)
    _check_experts(place, text, tensors)
    layers, found = text.get(_LAYERS), _layers_of_experts(tensors)
    # Some count the two halves of a layer.
    if isinstance(layers, int) and "num_layers" not in text and 0 < found < layers:
        raise CheckpointError(
            f"{place}: {_LAYERS} is {layers}, and the files have {found} layers: "
            "correct it, or complete the download"
        )


def _check_padding(place: str, text: Mapping[str, Any]) -> None:
    padding, tokens = text.get("pad_token_id"), text.get("vocab_size")
    # An embedding takes a row by its place from the end, too.
    if padding is not None and isinstance(tokens, int) and not -tokens <= padding < tokens:
        raise CheckpointError(
            f"{place}: pad_token_id is {padding}, beyond the vocabulary of {tokens} tokens: correct or "
            "remove it"
        )


def _rope_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings with settings of rotary embeddings, also of layers of one type."""
    for name in ("rope_scaling", "rope_parameters"):
        settings = text.get(name) or {}
        yield settings
        yield from (part for part in settings.values() if isinstance(part, dict))


def _check_rope_type(place: str, settings: Mapping[str, Any]) -> None:
    name = "rope_type" if "rope_type" in settings else "type"
    kind = settings.get(name, "default")
    if not isinstance(kind, str) or not _is_known(
        kind, "modeling_rope_utils.py", "models/*/configuration_*.py"
    ):
        shown = json.dumps(kind)[:40]
        raise UnsupportedModelError(
            f"{place}: transformers has no {name} {shown} of rotary embeddings: correct it, or update "
            "transformers"
        )


def _check_rope_numbers(place: str, settings: Mapping[str, Any]) -> None:
    for name in (*_ROPE_SIZES, *_ROPE_NUMBERS, *_ROPE_LISTS):
        value = settings.get(name)
        is_list = name in _ROPE_LISTS and isinstance(value, list)
        least = -_LARGEST if name in _ROPE_NUMBERS else 0
        if value is None:
            continue
        for number in value if is_list else [value]:
            if type(number) not in (int, float) or not least < number < _LARGEST:
                shown = json.dumps(number)[:40]
                wanted = "a number" if name in _ROPE_NUMBERS else "a number above 0"
                raise CheckpointError(f"{place}: {name} is {shown}, not {wanted}: {REPAIR}")


def _check_experts(place: str, text: Mapping[str, Any], tensors: list[str]) -> None:
    counts = {name: text[name] for name in NUM_EXPERTS if text.get(name) is not None}
    for name, count in counts.items():
        numbers = count if isinstance(count, list) else [count]
        if not all(type(n) is int and n >= 0 for n in numbers):
            shown = json.dumps(count)[:40]
            raise CheckpointError(f"{place}: {name} is {shown}, no number of experts: {REPAIR}")
    if not counts:
        return
    name = max(counts, key=lambda name: _most(counts[name]))
    most = counts[name]
    if _most(most) < 2:
        raise DenseModelError(
            f"{place}: {name} is {most}: a model with a single expert or none has nothing to route; serve "
            "it with another engine"
        )
    if any(isinstance(count, list) for count in counts.values()):
        return
    found = _count(_EXPERT, tensors)
    if found and found not in counts.values():
        raise CheckpointError(
            f"{place}: {name} is {most}, and the files have {found} experts: "
            "correct it, or complete the download"
        )
    for field in EXPERTS_PER_TOKEN:
        if isinstance(text.get(field), int) and text[field] > most:
            raise CheckpointError(
                f"{place}: {field} is {text[field]}, more than the {most} experts: {REPAIR}"
            )


def _layers_of_experts(tensors: list[str]) -> int:
    """Count the layers of the part of the model that has experts; 0 if no name tells."""
    found = next(filter(None, map(_OF_EXPERTS.match, tensors)), None)
    return 0 if found is None else _count(re.compile(rf"^{re.escape(found[1])}(\d+)\."), tensors)


def _most(count: int | list[int]) -> int:
    return max(count, default=0) if isinstance(count, list) else count


def _count(pattern: re.Pattern[str], tensors: Iterable[str]) -> int:
    """Highest number in the tensors' names plus one; 0 if no name has one."""
    return max(
        (int(found[1]) + 1 for name in tensors if (found := pattern.search(name))), default=0
    )


def _is_known(word: str, *files: str) -> bool:
    """Whether files of the installed transformers have a word; its import would take seconds.

    Args:
        word: As it stands in their code, in quotes.
        files: Patterns of their paths, searched in this order.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    root, quoted, is_empty = Path(spec.origin).parent, f'"{word}"', True
    for file in (file for pattern in files for file in root.glob(pattern)):
        is_empty = False
        if quoted in file.read_text(encoding="utf-8"):
            return True
    # Without its source, the role that imports it tells.
    return is_empty

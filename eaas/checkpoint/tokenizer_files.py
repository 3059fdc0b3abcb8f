"""Validation of what only an attention client reads: tokenizer, chat templates, sampling defaults.

Without torch or transformers: the launcher runs this before it starts any process.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from eaas.checkpoint.chat_templates import check_templates
from eaas.checkpoint.generation_file import GenerationFields
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.text_files import (
    LFS_POINTER,
    REPAIR,
    check_kinds,
    lfs_pointer,
    read_object,
    read_text,
)
from eaas.errors import CheckpointError, NotACheckpointError
from eaas.hub_cache import complete_download

__all__ = ["check_client_files", "is_vocabulary"]

_TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"
# Vocabularies of the tokenizers of transformers.
_VOCABULARY = re.compile(
    r"tokenizer\.json|tekken\.json|vocab.*|dict\.txt|.*\.(model|spm|tiktoken|codes)"
)
# A part of tokenizer.json in the errors of `tokenizers` -> its name in the file, and the module of its types.
_PARTS = {
    "Normalizer": ("normalizer", "normalizers"),
    "PreTokenizer": ("pre_tokenizer", "pre_tokenizers"),
    "Model": ("model", "models"),
    "MergeType": ("model.merges", ""),
    "PostProcessor": ("post_processor", "processors"),
    "Decoder": ("decoder", "decoders"),
}
_PART = re.compile(rf"untagged enum (?:Py)?({'|'.join(_PARTS)})(?:Untagged|Wrapper)?\b")
_PLACE = re.compile(r" at (line \d+ column \d+)$")
_TOKEN = (str, dict, NoneType)
_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The fields of tokenizer_config.json on which transformers fails.
_SETTINGS_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TOKENS, _TOKEN),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list, dict, NoneType),
    "auto_map": (dict, list),
    "chat_control_tokens": (list, NoneType),
    "chat_template": (str, list, dict, NoneType),
    "extra_special_tokens": (list, dict, NoneType),
    "init_inputs": (list,),
    "model_input_names": (list,),
    "model_max_length": (float, NoneType),
    "model_specific_special_tokens": (dict, NoneType),
    "split_special_tokens": (bool,),
    "tokenizer_class": (str, NoneType),
}


def is_vocabulary(name: str) -> bool:
    """Whether a file of this name may hold a tokenizer's vocabulary."""
    return _VOCABULARY.fullmatch(name) is not None


def check_client_files(source: LocalSource) -> None:
    """Check the files of a checkpoint that only attention clients read.

    Logs a warning if the chat templates have names, and none is the default.

    Raises:
        NotACheckpointError: There is no vocabulary.
        CheckpointError: A file is no JSON, has a field of the wrong kind, or is of a release of `tokenizers`
            that the installed one does not read; a chat template has a syntax error.
        OSError: A file cannot be read.
    """
    _check_vocabularies(source)
    _check_tokenizer(source)
    settings = read_object(source, _SETTINGS) or {}
    _check_settings(source.place(_SETTINGS), settings)
    tokens = read_object(source, "special_tokens_map.json") or {}
    check_kinds(source.place("special_tokens_map.json"), tokens, dict.fromkeys(_TOKENS, _TOKEN))
    added = read_object(source, "added_tokens.json") or {}
    check_kinds(source.place("added_tokens.json"), added, dict.fromkeys(added, (int,)))
    check_templates(source, source.place(_SETTINGS), settings.get("chat_template"))
    GenerationFields.of(source.place(_GENERATION), read_object(source, _GENERATION) or {})


def _check_vocabularies(source: LocalSource) -> None:
    names = [name for name in source.names() if _VOCABULARY.fullmatch(name)]
    if not names:
        raise NotACheckpointError(
            f"{source} has no tokenizer.json: copy it from the model that this one was made of, "
            f"or {complete_download(str(source))}"
        )
    for name in names:
        size = source.size(name)
        if size == 0:
            raise CheckpointError(f"{source.place(name)} is empty: download it again")
        head = bytearray(min(size or 0, len(LFS_POINTER)))
        source.read(name, 0, memoryview(head))
        if head == LFS_POINTER:
            raise lfs_pointer(source.place(name))


def _check_tokenizer(source: LocalSource) -> None:
    """Read tokenizer.json as transformers does. Raises CheckpointError: it cannot."""
    text = read_text(source, _TOKENIZER)
    if text is None:
        return
    import tokenizers

    try:
        tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # its only class
        # JSON's own errors have plainer words.
        document = read_object(source, _TOKENIZER) or {}
        at, words = _PLACE.search(str(error)), _PLACE.sub("", str(error))
        place = f"{source.place(_TOKENIZER)}{f': {at[1]}' if at else ''}"
        part = _unread_part(document, words)
        if not part:
            raise CheckpointError(f"{place}: {words.rstrip('.')}: {REPAIR}") from error
        raise CheckpointError(
            f"{place}: {part}, which tokenizers {tokenizers.__version__} does not read: install the release "
            "of tokenizers and transformers that wrote it, or download it again"
        ) from error


def _unread_part(document: dict[str, Any], words: str) -> str:
    """Name the part that `tokenizers` does not read; empty if its error names none."""
    found = _PART.search(words)
    if found is None:
        return ""
    name, module = _PARTS[found[1]]
    if module:
        known = importlib.import_module(f"tokenizers.{module}")
        unknown = [kind for kind in _types(document.get(name)) if not hasattr(known, kind)]
        if unknown:
            return f"{name} is of type {unknown[0]!r}"
    return f"{name} has another form"


def _types(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        # The parts of a sequence.
        for value in part.values():
            if isinstance(value, list):
                for item in value:
                    yield from _types(item)


def _check_settings(place: str, settings: Mapping[str, Any]) -> None:
    check_kinds(place, settings, _SETTINGS_KINDS)
    for side in ("padding_side", "truncation_side"):
        if settings.get(side, "left") not in ("left", "right"):
            raise CheckpointError(f'{place}: {side} is neither "left" nor "right": {REPAIR}')
    if isinstance(settings.get("auto_map"), list) and len(settings["auto_map"]) < 2:
        raise CheckpointError(f"{place}: auto_map lists fewer than two names: {REPAIR}")
    decoder = settings.get("added_tokens_decoder", {})
    for number, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not number.isdecimal() or not isinstance(content, str):
            raise CheckpointError(
                f"{place}: added_tokens_decoder: {json.dumps(number)} is no number of a token with text "
                f'in "content": {REPAIR}'
            )
    # The former name counts if the present one is absent.
    extra = "extra_special_tokens"
    extra = extra if settings.get(extra) else "additional_special_tokens"
    for field in (extra, "model_specific_special_tokens"):
        tokens = settings.get(field) or {}
        parts = tokens.values() if isinstance(tokens, dict) else tokens
        if _is_added_token(tokens) or not all(
            isinstance(t, str) or _is_added_token(t) for t in parts
        ):
            raise CheckpointError(f"{place}: {field} holds what is no token: {REPAIR}")
    for field in _TOKENS:
        if isinstance(settings.get(field), dict) and not _is_added_token(settings[field]):
            raise CheckpointError(f'{place}: {field} lacks "__type" or "content": {REPAIR}')


def _is_added_token(token: object) -> bool:
    return (
        isinstance(token, dict)
        and token.get("__type") == "AddedToken"
        and isinstance(token.get("content"), str)
    )

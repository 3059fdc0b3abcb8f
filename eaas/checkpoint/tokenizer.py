"""A checkpoint's tokenizer and the tokens that end an answer, for frontends and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eaas.errors import NotACheckpointError
from eaas.log import one_line

__all__ = ["end_tokens", "load_tokenizer"]


def load_tokenizer(path: Path) -> Any:
    """Load a checkpoint's tokenizer. Raises NotACheckpointError: it cannot be used."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # `tokenizers` raises no other class
        raise NotACheckpointError(
            f"{path}: the files of the tokenizer cannot be used ({type(error).__name__}: "
            f"{one_line(error)}): download tokenizer.json and tokenizer_config.json again"
        ) from error
    # If all files are missing, transformers makes an empty tokenizer.
    if not any((path / name).is_file() for name in tokenizer.vocab_files_names.values()):
        raise NotACheckpointError(
            f"{path}: the tokenizer cannot be loaded; add tokenizer.json (there is no vocabulary)"
        )
    return tokenizer


def end_tokens(generation_config: Any, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of generation_config.json and the tokenizer's.

    Args:
        generation_config: transformers' `GenerationConfig`.
        tokenizer: transformers' tokenizer.
        vocabulary: Size of the model's vocabulary; end tokens beyond it cannot occur.
    """
    ends = generation_config.eos_token_id
    named = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    known = (end for end in named if end is not None and 0 <= end < vocabulary)
    return tuple(dict.fromkeys(known))

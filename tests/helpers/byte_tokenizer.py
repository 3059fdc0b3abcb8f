"""A tokenizer whose tokens are bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["byte_tokenizer"]


def byte_tokenizer(*special: str, **names: str) -> PreTrainedTokenizerFast:
    """Each byte is a token below 256; the special tokens follow.

    Args:
        special: The special tokens.
        names: Their roles, such as eos_token="</s>".
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)

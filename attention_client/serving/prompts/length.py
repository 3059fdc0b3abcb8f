"""A lower bound on the tokens of a text, from its length, without tokenizing it.

In byte-level BPE each character of a token stands for one byte of the text, and no byte is lost. So a text of
N bytes has at least N / longest tokens. Other tokenizers have no bound here: their texts are tokenized first.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["LengthBound", "length_bound"]

# A composed character has at least two bytes and comes from at most four characters of at most four bytes.
_NFC_SHRINKING = 8
_SPLITTERS = {"Digits", "Punctuation", "Split"}  # keep all text unless their behaviour is "Removed"


@dataclass(frozen=True)
class LengthBound:
    """The bound of one tokenizer.

    Attributes:
        bytes_per_token: Most bytes of UTF-8 that one token stands for.
    """

    bytes_per_token: int

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens."""
        return math.ceil(len(text.encode()) / self.bytes_per_token)


def length_bound(steps: dict[str, Any]) -> LengthBound | None:
    """Return the bound of a tokenizer; None: it has none.

    Args:
        steps: The content of its tokenizer.json (Hugging Face's `tokenizers`).
    """
    model, added = steps["model"], steps["added_tokens"]
    normalizers = [step["type"] for step in _flat(steps["normalizer"], "normalizers")]
    *splitters, last = [*_flat(steps["pre_tokenizer"], "pretokenizers")] or [{"type": None}]
    if (
        model["type"] != "BPE"
        or model["continuing_subword_prefix"]
        or model["end_of_word_suffix"]
        or not set(model["vocab"]) >= set(ByteLevel.alphabet())
        or last["type"] != "ByteLevel"
        or any(s["type"] not in _SPLITTERS or s.get("behavior") == "Removed" for s in splitters)
        or not set(normalizers) <= {"NFC"}
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    # Added tokens are matched in the text, or in its normal form, before the model sees it.
    texts = [token["content"] for token in added]
    texts += [unicodedata.normalize("NFC", text) for text in texts]
    longest = max(*map(len, model["vocab"]), *(len(text.encode()) for text in texts))
    return LengthBound(longest * (_NFC_SHRINKING if normalizers else 1))


def _flat(step: dict[str, Any] | None, parts: str) -> Iterator[dict[str, Any]]:
    """Flatten nested sequences of steps."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[parts]:
        yield from _flat(part, parts)

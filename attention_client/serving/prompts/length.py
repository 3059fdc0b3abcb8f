"""A lower bound on a text's tokens, from its length: the prompt worker refuses long prompts untokenized.

A token stands for a limited number of bytes: those of the longest vocabulary entry. So a text of N bytes has
at least N / longest tokens, if no step of the tokenizer drops text or maps any amount of text to one token.
The steps are those of Hugging Face's `tokenizers` (tokenizer.json). A tokenizer has no
bound if a step is unknown or gives no such guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["LengthBound", "length_bound"]

# Most input bytes for one output byte. Composing forms: a composed character has at least two bytes and comes
# from at most four characters of at most four bytes. Other forms: one character stays one character.
_NORMALIZERS = {
    "ByteLevel": 1,
    "Lowercase": 4,
    "NFC": 8,
    "NFD": 4,
    "NFKC": 8,
    "NFKD": 4,
    "Prepend": 1,
    "Strip": 1,
}
_BLANK_DROPPERS = {"BertPreTokenizer", "Strip", "Whitespace", "WhitespaceSplit"}
_PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
_SPLITTERS = {"Punctuation", "Split"}  # keep all text unless their behaviour is "Removed"


@dataclass(frozen=True)
class LengthBound:
    """Lower bound on the tokens of a text, for one tokenizer.

    Attributes:
        bytes_per_token: Most bytes of UTF-8 that one token stands for.
        drops_blanks: Whether whitespace may become no token.
    """

    bytes_per_token: int
    drops_blanks: bool = False

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text. If even this is too many, the prompt is refused."""
        if self.drops_blanks:
            text = "".join(text.split())
        return math.ceil(len(text.encode()) / self.bytes_per_token)


class _NoBoundError(Exception):
    """Raised for a tokenizer whose steps allow no bound; its prompts are tokenized before the check."""


def length_bound(tokenizer: Tokenizer, steps: dict[str, Any]) -> LengthBound | None:
    """Derive the bound of a tokenizer from its steps; None: it has none.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        steps: The content of its tokenizer.json.
    """
    normalizers = list(_flat(steps["normalizer"], "normalizers"))
    pre_tokenizers = list(_flat(steps["pre_tokenizer"], "pretokenizers"))
    try:
        shrinking = math.prod(_shrinking(step) for step in normalizers)
        for step in pre_tokenizers:
            _check_pre_tokenizer(step)
        byte_level = any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers)
        longest = _longest_token(steps["model"], byte_level)
        drops_blanks = _drops_blanks(normalizers, pre_tokenizers, steps["added_tokens"])
    except _NoBoundError:
        return None
    # Added tokens are matched in the text, or in its normal form, before the model sees it.
    for added in steps["added_tokens"]:
        forms = [added["content"]]
        if tokenizer.normalizer is not None:
            forms.append(tokenizer.normalizer.normalize_str(added["content"]))
        longest = max(longest, *(len(form.encode()) for form in forms))
    return LengthBound(longest * shrinking, drops_blanks)


def _flat(step: dict[str, Any] | None, parts: str) -> Iterator[dict[str, Any]]:
    """Flatten a tokenizer's nested sequences of steps."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[parts]:
        yield from _flat(part, parts)


def _shrinking(step: dict[str, Any]) -> int:
    """Return the most input bytes for one output byte of this normalizer."""
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        if old is None or not len(step["content"].encode()) >= len(old.encode()) > 0:
            raise _NoBoundError
        return 1
    if step["type"] not in _NORMALIZERS:
        raise _NoBoundError
    return _NORMALIZERS[step["type"]]


def _check_pre_tokenizer(step: dict[str, Any]) -> None:
    kind = step["type"]
    if kind in _SPLITTERS and step["behavior"] != "Removed":
        return
    if kind not in _PRE_TOKENIZERS:
        raise _NoBoundError


def _drops_blanks(
    normalizers: list[dict[str, Any]],
    pre_tokenizers: list[dict[str, Any]],
    added_tokens: list[dict[str, Any]],
) -> bool:
    """Whether the tokenizer may turn whitespace into no token, so that the bound must leave it out."""
    steps = normalizers + pre_tokenizers
    strips = any(added["lstrip"] or added["rstrip"] for added in added_tokens)
    if not strips and not any(step["type"] in _BLANK_DROPPERS for step in steps):
        return False
    # No step before may turn other text into whitespace. Only Replace can.
    if any(step["type"] == "Replace" and any(map(str.isspace, step["content"])) for step in steps):
        raise _NoBoundError
    return True


def _longest_token(model: dict[str, Any], byte_level: bool) -> int:
    """Return the bytes of the longest token. Raises _NoBoundError if the model may drop text."""
    if model["type"] == "BPE":
        vocabulary = list(model["vocab"])
        if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
            raise _NoBoundError  # a character may be known at one position of a word and unknown at another
        # The model may drop unknown characters or fuse them to one token. Else each is one token of at most
        # four bytes.
        one_by_one = model["unk_token"] is not None and not model["fuse_unk"]
    elif model["type"] == "Unigram":
        vocabulary = [token for token, _ in model["vocab"]]
        one_by_one = False
    else:
        raise _NoBoundError
    known = set(vocabulary)
    if byte_level and known >= set(ByteLevel.alphabet()):
        return max(map(len, vocabulary))  # each character stands for one byte of the text
    fallback = {f"<0x{byte:02X}>" for byte in range(256)}
    if not (model["byte_fallback"] and known >= fallback) and not one_by_one:
        raise _NoBoundError
    return max(4, *(len(token.encode()) for token in vocabulary))

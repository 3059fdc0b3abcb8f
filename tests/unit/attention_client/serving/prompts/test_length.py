"""The bound is correct: no text has fewer tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from attention_client.serving.prompts.length import LengthBound, length_bound
from eaas_cli.demo_model.tokenizer import build_tokenizer

WORDS = ["the", "quick", "brown", "fox", "12345"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Composition shortens these: a Hangul syllable of three letters, alpha with three marks, two signs.
SHORTENED = ["\u1100\u1161\u11a8", "\u03b1\u0313\u0342\u0345", "\u212b", "\u1fef"]
SPECIAL = [
    AddedToken("<|end|>", special=True),
    AddedToken("<mask\u0301>", normalized=True),
]


BYTES = pre_tokenizers.ByteLevel(False)


def build(
    model: Any,
    pre_tokenizer: Any = BYTES,
    normalizer: Any = None,
    added: Sequence[AddedToken] = (),
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_level(**options: Any) -> Any:
    vocabulary = {c: i for i, c in enumerate([*ALPHABET, "th", "the", "ĠĠ", "ĠĠĠĠ"])}
    return models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")], **options)


def after(*splitters: Any) -> Any:
    return pre_tokenizers.Sequence([*splitters, BYTES])


def bytes_after(normalizer: Any) -> Tokenizer:
    """A tokenizer whose longest tokens are rows of characters that normal forms shorten."""
    splitter = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    unsplit = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer = build(
        models.BPE(), pre_tokenizers.Sequence([splitter, unsplit]), normalizer, SPECIAL
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=ALPHABET, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([" ".join(text * 8 for text in SHORTENED)], trainer)
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "demo 300": lambda: build_tokenizer(300, 4096).backend_tokenizer,
    "demo 1000": lambda: build_tokenizer(1000, 4096).backend_tokenizer,
    "bytes": lambda: build(byte_level()),
    "bytes, ignore_merges": lambda: build(byte_level(ignore_merges=True), added=SPECIAL),
    "NFC": lambda: bytes_after(normalizers.NFC()),
    "several splitters": lambda: build(
        byte_level(),
        after(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()),
        normalizers.Sequence([]),
        SPECIAL,
    ),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "accents": lambda: bytes_after(normalizers.StripAccents()),
    "removed": lambda: bytes_after(normalizers.Replace("a", "")),
    "stripped": lambda: bytes_after(normalizers.Strip()),
    "split away": lambda: build(byte_level(), after(pre_tokenizers.Split("a", "removed"))),
    "blanks split away": lambda: build(byte_level(), after(pre_tokenizers.Whitespace())),
    "blanks beside an added token": lambda: build(
        byte_level(), added=[AddedToken("<mask>", lstrip=True)]
    ),
    "no bytes": lambda: build(byte_level(), pre_tokenizers.Metaspace()),
    "no unknowns": lambda: build(models.BPE({"a": 0}, [])),
    "suffix": lambda: build(byte_level(end_of_word_suffix="</w>")),
    "Unigram": lambda: build(models.Unigram([("<unk>", 0.0)], 0, False)),
}


@functools.cache
def bounded(name: str) -> tuple[Tokenizer, LengthBound]:
    tokenizer = BOUNDED[name]()
    bound = length_bound(json.loads(tokenizer.to_str()))
    assert bound is not None
    return tokenizer, bound


PIECES = st.one_of(
    st.sampled_from([*WORDS, "  ", "\n", "▁▁", "<|end|>", "<mask\u0301>", "the the"]),
    st.sampled_from(SHORTENED),
    st.text(max_size=4),
    st.sampled_from(" \u2003\u00a0\u3000\u0085"),
)


@pytest.mark.parametrize("name", BOUNDED)
@given(parts=st.lists(st.tuples(PIECES, st.integers(1, 40)), max_size=6))
@settings(max_examples=60)
def test_no_text_has_fewer_tokens_than_the_bound_says(
    name: str, parts: list[tuple[str, int]]
) -> None:
    tokenizer, bound = bounded(name)
    text = "".join(piece * times for piece, times in parts)
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_each_repeated_token_keeps_to_the_bound(name: str) -> None:
    tokenizer, bound = bounded(name)
    for text in SHORTENED:
        tokens = tokenizer.encode(text * 80, add_special_tokens=False).ids
        assert bound.least_tokens(text * 80) <= len(tokens), repr(text)
    for token in tokenizer.get_vocab():
        for text in (token, tokenizer.decode([tokenizer.token_to_id(token)])):
            tokens = tokenizer.encode(text * 8, add_special_tokens=False).ids
            assert bound.least_tokens(text * 8) <= len(tokens), repr(text)


@pytest.mark.parametrize("name", ["demo 300", "bytes", "NFC"])
def test_a_megabyte_is_known_to_be_long(name: str) -> None:
    _, bound = bounded(name)
    assert bound.least_tokens("x" * 2**20) > 2048


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_if_text_can_vanish(name: str) -> None:
    tokenizer = UNBOUNDED[name]()
    assert length_bound(json.loads(tokenizer.to_str())) is None

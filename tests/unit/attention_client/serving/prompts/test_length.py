"""The bound is correct: no text has fewer tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
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
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from attention_client.serving.prompts.length import LengthBound, length_bound
from eaas_cli.demo_model.tokenizer import build_tokenizer

WORDS = ["the", "quick", "brown", "fox", "12345"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}
# Composition and compatibility shorten these; the last ones grow.
SHORTENED = [
    "\u1100\u1161\u11a8",  # a Hangul syllable of three letters
    "\u03b1\u0313\u0342\u0345",  # alpha with three marks
    "\u212b",
    "\u212a",
    "\u1fef",
    "\U0001d400",
    "\uff21\u030a",
    "\u00a8",
    "\ufdfa",
]
SPECIAL = [
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<mask>", lstrip=True, normalized=True),
]


def build(
    model: Any,
    normalizer: Normalizer | None = None,
    pre_tokenizer: PreTokenizer | None = None,
    added: list[AddedToken] | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(added or [])
    return tokenizer


def byte_level(**options: Any) -> Any:
    vocabulary = {c: i for i, c in enumerate([*ALPHABET, "th", "the", "ĠĠ", "ĠĠĠĠ"])}
    return models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")], **options)


def with_bytes(**options: Any) -> Any:
    """Like Llama's tokenizer: unknown characters become tokens of their bytes."""
    vocabulary = BYTE_TOKENS | {"<unk>": 256, "▁": 257, "t": 258, "h": 259, "th": 260, "▁▁": 261}
    merges = [("t", "h"), ("▁", "▁")]
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"} | options
    return models.BPE(vocabulary, merges, **options)


def unigram(*, fallback: bool) -> Any:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("t", -3.0), ("the", -4.0), ("▁▁▁", -3.0)]
    pieces += [(token, -9.0) for token in BYTE_TOKENS] if fallback else []
    return models.Unigram(pieces, 0, fallback)


def bytes_after(*normal: Normalizer) -> Tokenizer:
    """A tokenizer whose longest tokens are rows of characters that normal forms shorten."""
    tokenizer = build(
        models.BPE(),
        normalizers.Sequence(list(normal)),
        pre_tokenizers.Split(Regex(r"\s"), "isolated"),
        SPECIAL,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    rows = [text * 8 for text in SHORTENED]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=ALPHABET, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([" ".join(rows)], trainer)
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    **{
        f"demo {vocab}": functools.partial(
            lambda vocab: build_tokenizer(vocab, 4096).backend_tokenizer, vocab
        )
        for vocab in (300, 512, 1000)
    },
    "bytes": lambda: build(byte_level(), None, pre_tokenizers.ByteLevel(False)),
    "bytes, ignore_merges": lambda: build(
        byte_level(ignore_merges=True), None, pre_tokenizers.ByteLevel(), SPECIAL
    ),
    "NFC": lambda: bytes_after(normalizers.NFC()),
    "NFD": lambda: bytes_after(normalizers.NFD()),
    "NFKC": lambda: bytes_after(normalizers.NFKC()),
    "lower case": lambda: bytes_after(normalizers.Lowercase()),
    "NFKC, lower case": lambda: bytes_after(normalizers.NFKC(), normalizers.Lowercase()),
    "NFKD, strip": lambda: bytes_after(normalizers.NFKD(), normalizers.Strip()),
    "Llama": lambda: build(
        with_bytes(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        SPECIAL,
    ),
    "Metaspace": lambda: build(with_bytes(), None, pre_tokenizers.Metaspace()),
    "words": lambda: build(
        byte_level(),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)]),
    ),
    "unknown one by one": lambda: build(
        with_bytes(byte_fallback=False, fuse_unk=False), None, pre_tokenizers.WhitespaceSplit()
    ),
    "Unigram": lambda: build(unigram(fallback=True), None, pre_tokenizers.Metaspace()),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "accents": lambda: bytes_after(normalizers.NFD(), normalizers.StripAccents()),
    "removed": lambda: bytes_after(normalizers.Replace("a", "")),
    "shortened": lambda: bytes_after(normalizers.Replace("aaaa", "b")),
    "pattern": lambda: bytes_after(normalizers.Replace(Regex("a+"), "aaaa")),
    "made blank": lambda: bytes_after(normalizers.Replace("a", " "), normalizers.Strip()),
    "control characters": lambda: bytes_after(normalizers.Nmt()),
    "split away": lambda: build(
        byte_level(),
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "fused unknowns": lambda: build(with_bytes(byte_fallback=False)),
    "no unknowns": lambda: build(models.BPE({"a": 0}, [])),
    "suffix": lambda: build(
        byte_level(end_of_word_suffix="</w>"), None, pre_tokenizers.ByteLevel()
    ),
    "fused Unigram": lambda: build(unigram(fallback=False)),
    "whole words": lambda: build(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")),
    "word pieces": lambda: build(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
}


@functools.cache
def bounded(name: str) -> tuple[Tokenizer, LengthBound]:
    tokenizer = BOUNDED[name]()
    bound = length_bound(tokenizer, json.loads(tokenizer.to_str()))
    assert bound is not None
    return tokenizer, bound


PIECES = st.one_of(
    st.sampled_from([*WORDS, "  ", "\n", "▁▁", "<|end|>", "<mask>", "the the"]),
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


@pytest.mark.parametrize("name", ["demo 512", "bytes", "NFC", "Llama", "Unigram"])
def test_a_megabyte_is_known_to_be_long(name: str) -> None:
    _, bound = bounded(name)
    assert bound.least_tokens("x" * 2**20) > 2048


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_if_text_can_vanish(name: str) -> None:
    tokenizer = UNBOUNDED[name]()
    assert length_bound(tokenizer, json.loads(tokenizer.to_str())) is None


def test_no_character_alone_becomes_whitespace() -> None:
    """Otherwise a bound without whitespace would be too high."""
    forms = [normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase()]
    for code in (*range(0xD800), *range(0xE000, 0x30000)):
        character = chr(code)
        if not character.isspace():
            for form in forms:
                assert form.normalize_str(character).strip(), hex(code)

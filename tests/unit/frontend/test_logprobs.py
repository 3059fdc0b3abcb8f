"""Scores of tokens, and OpenAI's two forms of them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from attention_client.generation.scores import score
from byte_tokenizer import byte_tokenizer
from eaas.generation.scores import Scores
from frontend.requests.logprobs import (
    CompletionLogprobs,
    Scored,
    TokenTexts,
    chat_logprobs,
)

TOKENIZER = byte_tokenizer("</s>", eos_token="</s>")
TEXTS = TokenTexts(TOKENIZER)
END, VOCABULARY = 256, 257


def scored(tokens: list[int], top: int = 2, seed: int = 0) -> Scored:
    logits_TV = (
        torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    )
    return Scored(tokens, score(logits_TV, torch.tensor(tokens, dtype=torch.int64), top))


@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 2**31))
def test_scores_are_log_softmax(count: int, top: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_TV = (torch.randn(count, 9, generator=generator) * 5).bfloat16()
    tokens_T = torch.randint(9, (count,), generator=generator)
    found = score(logits_TV, tokens_T, top)
    expected_TV = torch.log_softmax(logits_TV.float(), -1)
    np.testing.assert_array_equal(found.logprob_T, expected_TV[torch.arange(count), tokens_T])
    assert found.top_TK.shape == found.top_logprob_TK.shape == (count, top)
    np.testing.assert_array_equal(found.top_logprob_TK, expected_TV.topk(top).values)


@given(st.text(max_size=30))
def test_bytes_and_offsets_add_up_to_the_text(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    if not tokens:
        return
    records = chat_logprobs(TEXTS, scored(tokens))["content"]
    assert bytes(byte for record in records for byte in record["bytes"]).decode() == text
    form = CompletionLogprobs(TEXTS, skips_special=True)(scored(tokens))
    offsets = form["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, offset in zip(tokens, offsets, strict=True):
        if TEXTS.data(token).isascii():
            assert text[offset] == TEXTS.text(token)


@given(st.lists(st.integers(0, END), min_size=1, max_size=30), st.data())
def test_a_form_does_not_depend_on_the_parts(tokens: list[int], data: st.DataObject) -> None:
    whole = scored(tokens)
    cut = data.draw(st.integers(0, len(tokens)))
    parts = [
        Scored(tokens[begin:end], whole.scores.rows(begin, end, 2))
        for begin, end in ((0, cut), (cut, len(tokens)))
    ]
    for make in (
        lambda: partial(chat_logprobs, TEXTS),
        lambda: CompletionLogprobs(TEXTS, skips_special=False),
    ):
        expected: Any = make()(whole)
        form = make()
        first, second = [form(part) for part in parts]
        for name, values in expected.items():
            if values is not None:
                assert first[name] + second[name] == values
        assert make()(Scored.joined(parts)) == expected
        assert json.loads(json.dumps(expected, allow_nan=False)) == expected


def test_the_first_token_of_a_prompt_has_no_score() -> None:
    first = Scored([65], Scores.none(2))
    form = CompletionLogprobs(TEXTS, skips_special=True)(Scored.joined([first, scored([66])]))
    assert form["token_logprobs"][0] is form["top_logprobs"][0] is None
    assert form["token_logprobs"][1] < 0


def test_impossible_tokens_have_a_number() -> None:
    logits_TV = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    found = Scored([1], score(logits_TV, torch.tensor([1]), 2))
    assert chat_logprobs(TEXTS, found)["content"][0]["logprob"] == -9999.0
    form = CompletionLogprobs(TEXTS, skips_special=True)(found)
    assert form["token_logprobs"] == [-9999.0]
    assert max(form["top_logprobs"][0].values()) == 0.0


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    broken = [token for token in range(256) if TEXTS.text(token) == "\ufffd"][:2]
    logits_TV = torch.full((1, VOCABULARY), -50.0)
    logits_TV[0, broken] = torch.tensor([1.0, 2.0])
    found = Scored([broken[0]], score(logits_TV, torch.tensor([broken[0]]), 2))
    form = CompletionLogprobs(TEXTS, skips_special=True)(found)
    assert list(form["top_logprobs"][0]) == ["\ufffd"]
    assert form["top_logprobs"][0]["\ufffd"] > form["token_logprobs"][0]


def test_added_tokens_are_read_as_the_decoder_reads_them() -> None:
    tokenizer = byte_tokenizer("</s>", eos_token="</s>")
    tokenizer.add_tokens(["é b", "Ġ"])
    texts = TokenTexts(tokenizer)
    for name in ("é b", "Ġ"):
        token = tokenizer.convert_tokens_to_ids(name)
        assert texts.text(token) == tokenizer.decode([token])
        assert not texts.is_special(token)
    assert texts.is_special(END)


@pytest.mark.parametrize(
    ("name", "data"),
    [("▁the", b" the"), ("cat", b"cat"), ("<0xE2>", b"\xe2"), ("</s>", b"</s>")],
)
def test_tokens_of_sentencepiece(name: str, data: bytes) -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "cat": 2, "<0xE2>": 3, "</s>": 4}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert TokenTexts(tokenizer).data(vocabulary[name]) == data
    assert TokenTexts(tokenizer).data(99) == b""

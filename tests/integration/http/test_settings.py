"""Penalties, biases and the other settings that change the choice of tokens or the text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from http_box import Box, events, tiny_model

pytestmark = pytest.mark.integration


def text(box: Box, prompt: Any = "Hello", **fields: Any) -> str:
    return str(box.complete(prompt, **fields)["choices"][0]["text"])


def test_a_repetition_penalty_is_that_of_transformers(engine: Box) -> None:
    kind = engine.model.config.model_type
    prompt = engine.tokenizer("Hello")["input_ids"]
    config = GenerationConfig(
        max_new_tokens=16, do_sample=False, repetition_penalty=1.7, eos_token_id=-1
    )
    prompt_1T = torch.tensor([prompt])
    expected = tiny_model(kind).generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), generation_config=config
    )[0, len(prompt) :]
    assert text(engine, max_tokens=16, repetition_penalty=1.7) == engine.tokenizer.decode(
        expected, skip_special_tokens=True
    )


def test_penalties_beside_other_requests_and_evictions(box: Box) -> None:
    fields: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0},
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 3, "top_k": 40, "presence_penalty": 1.0},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "min_p": 0.01},
        {"logit_bias": {"65": 4.0}},
    ]
    alone = [text(box, max_tokens=40, **each) for each in fields]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda each: text(box, max_tokens=40, **each), fields * 2))
    assert together == alone * 2
    assert len(set(alone)) == len(fields)


def test_a_bias_forces_or_forbids_a_token(engine: Box) -> None:
    letter = engine.tokenizer("A")["input_ids"][0]
    assert text(engine, max_tokens=5, logit_bias={str(letter): 100}) == "AAAAA"
    assert text(engine, max_tokens=5, logit_bias={}) == engine.text("Hello", 5)
    first = engine.expected["Hello"][0]
    forbidden = engine.complete(max_tokens=1, logit_bias={str(first): -100}, logprobs=1)
    logprobs = forbidden["choices"][0]["logprobs"]
    # The report is of the model's own distribution.
    assert logprobs["token_logprobs"][0] < max(logprobs["top_logprobs"][0].values())


def test_min_p_leaves_the_likeliest(engine: Box) -> None:
    assert text(engine, temperature=2.0, seed=1, min_p=1.0) == engine.text("Hello")
    assert text(engine, temperature=2.0, seed=1) != engine.text("Hello")


def test_stop_tokens(engine: Box) -> None:
    tokens = engine.expected["Hello"]
    first = tokens.index(tokens[5])
    for fields in ({}, {"ignore_eos": False}):
        answer = engine.complete(stop_token_ids=[tokens[5], 3], **fields)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == engine.text("Hello", first)
        assert answer["usage"]["completion_tokens"] == first + 1
    shown = engine.complete(stop_token_ids=[tokens[5]], include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == engine.text("Hello", first + 1)
    late = engine.complete(stop_token_ids=[tokens[5]], min_tokens=first + 2)
    assert late["usage"]["completion_tokens"] >= first + 2


def test_no_tokens(engine: Box) -> None:
    answer = engine.complete(max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    assert text(engine, ["Hello"], max_tokens=0, echo=True) == "Hello"
    assert text(engine, "Hello", max_tokens=3, echo=True) == "Hello" + engine.text("Hello", 3)
    # Text of a large body comes from the prompt worker.
    assert text(engine, "é" * 40, max_tokens=0, echo=True, metadata="m" * 70_000) == "é" * 40
    engine.wait_idle()


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(2.0**-126, 1),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(2.0**-126, 3.4e38),
        "logit_bias": st.dictionaries(
            st.integers(0, 259).map(str), st.floats(-100, 100), max_size=4
        ),
        "stop_token_ids": st.lists(st.integers(0, 259), max_size=3),
        "stop": st.lists(st.text(min_size=1, max_size=2), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stream": st.booleans(),
        "min_tokens": st.integers(0, 2),
    },
)
TOKENS = st.lists(st.integers(0, 259), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SETTINGS,
    st.lists(TOKENS, min_size=1, max_size=3),
    st.none() | st.integers(0, 20),
    st.booleans(),
    st.integers(2, 5) | st.just(0),
)
def test_settings_go_together(
    shared_box: Box,
    chosen: dict[str, Any],
    prompts: list[list[int]],
    top: int | None,
    echo: bool,
    max_tokens: int,
) -> None:
    """Any settings are answered: each choice has its text, its end and a report of each token."""
    if max_tokens < chosen.get("min_tokens", 0):
        max_tokens = 2
    body = chosen | {"prompt": prompts, "logprobs": top, "echo": echo, "max_tokens": max_tokens}
    response = shared_box.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    each_n = chosen.get("n", 1)
    if chosen.get("stream"):
        chunks = events(response.text)
        ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
        assert sorted(c["index"] for c in ends) == list(range(each_n * len(prompts)))
        return
    answer = response.json()
    assert len(answer["choices"]) == each_n * len(prompts)
    generated = 0
    for choice in answer["choices"]:
        assert choice["finish_reason"] in ("stop", "length")
        prompt = prompts[choice["index"] // each_n]
        if top is None:
            assert choice["logprobs"] is None
        elif echo or max_tokens:
            generated += len(choice["logprobs"]["tokens"]) - (len(prompt) if echo else 0)
            assert len({len(values) for values in choice["logprobs"].values()}) == 1
    if top is not None:
        assert generated == answer["usage"]["completion_tokens"]

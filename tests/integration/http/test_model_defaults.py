"""What generation_config.json and the tokenizer decide for requests and `eaas generate` where they do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

from eaas_cli.commands import app
from http_box import CHAT, END, Box, tiny_model

pytestmark = pytest.mark.integration

KINDS = ["qwen3_moe", "qwen3_next"]
OTHER_END = 200


@pytest.fixture(scope="module", params=KINDS)
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    generation = {
        "do_sample": True,
        "temperature": 1e-6,  # greedy
        "repetition_penalty": 0.5,
        "max_new_tokens": 9,
        "eos_token_id": [OTHER_END],
    }
    with Box(request.param, generation=generation) as box:
        yield box


def test_the_penalty_is_the_files_unless_a_request_has_its_own(box: Box) -> None:
    prompt = box.tokenizer("Hello")["input_ids"]
    config = GenerationConfig(
        max_new_tokens=16, do_sample=False, repetition_penalty=0.5, eos_token_id=-1
    )
    prompt_1T = torch.tensor([prompt])
    expected = tiny_model(box.model.config.model_type).generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), generation_config=config
    )[0, len(prompt) :]

    def text(**fields: Any) -> str:
        return str(box.complete(max_tokens=16, **fields)["choices"][0]["text"])

    assert text() == box.tokenizer.decode(expected, skip_special_tokens=True)
    assert text(repetition_penalty=1) == box.text("Hello", 16) != text()


def test_the_length_is_the_files_unless_a_request_has_its_own(box: Box) -> None:
    def tokens(path: str, **body: Any) -> int:
        answer = box.http.post(path, json=body | {"ignore_eos": True})
        return int(answer.json()["usage"]["completion_tokens"])

    assert tokens("/v1/chat/completions", **CHAT) == 9
    assert tokens("/v1/chat/completions", **CHAT, max_tokens=30) == 30
    assert tokens("/v1/completions", prompt="a") == 9
    assert tokens("/v1/completions", prompt="a", max_tokens=30) == 30


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_an_answer_ends_at_the_tokenizers_end_token_and_at_the_files(box: Box, end: int) -> None:
    bias = {"logit_bias": {str(end): 100}}

    def tokens(**fields: Any) -> int:
        answer = box.complete(**bias, **fields)
        return int(answer["usage"]["completion_tokens"])

    assert tokens(ignore_eos=False) == 1
    # The ban of both lasts for 5 tokens.
    assert tokens(ignore_eos=False, min_tokens=5) == 6
    assert tokens(ignore_eos=True) == 24
    # The grammar permits an end once it is complete.
    answer = box.complete(**bias, guided_regex="[ab]{2,9}", ignore_eos=False)
    assert answer["usage"]["completion_tokens"] == 3
    assert set(answer["choices"][0]["text"]) <= {"a", "b"}


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_are_not_supported_are_named_once_and_change_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    generation = {"suppress_tokens": [*range(32, 127)], "num_beams": 3, "no_repeat_ngram_size": 1}
    with caplog.at_level(logging.WARNING), Box(kind, generation=generation) as box:
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
    (said,) = (r.message for r in caplog.records if "generation_config.json" in r.message)
    assert said.count("\n") == 0
    assert all(name in said for name in generation)


@pytest.fixture(scope="module")
def sampling_box() -> Iterator[Box]:
    with Box(generation={"do_sample": True, "temperature": 1.2, "top_k": 50}) as box:
        yield box


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_checkpoint_sets_the_default_sampling(sampling_box: Box, form: tuple[str, ...]) -> None:
    def generate(*options: str) -> str:
        words = ["generate", "Hello", "--max-tokens", "24", "--endpoint", sampling_box.url]
        done = CliRunner().invoke(app, [*words, *options, *form])
        assert done.exit_code == 0, done.output
        # Without the id, which differs.
        return done.stdout.partition('"choices"')[2] or done.stdout

    assert len({generate() for _ in range(2)}) == 2
    greedy = {generate("--temperature", "0") for _ in range(2)}
    assert len(greedy) == 1
    (text,) = greedy
    if not form:
        assert text.startswith(sampling_box.text("Hello", 4))

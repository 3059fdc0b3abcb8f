"""Prompts of domains, as `python -m benchmarks.validate` asks for them."""

from __future__ import annotations

import pytest

from benchmarks.validate.compare_recording import reversed_gaps
from benchmarks.validate.domains import DomainWorkload, TextWorkload, check_texts
from eaas.errors import ConfigError


def test_prompts_come_in_bursts_of_a_domain() -> None:
    workload = DomainWorkload(100, 1, prompt_tokens=40, output_tokens=4, burst=5)
    prompts = [workload.prompt(index) for index in range(45)]
    assert prompts == [workload.prompt(index) for index in range(45)]
    assert len({tuple(prompt) for prompt in prompts}) == 45  # no prefix is shared as a whole
    bursts = [set().union(*prompts[begin : begin + 5]) for begin in range(0, 45, 5)]
    assert all(len(tokens) == 6 for tokens in bursts)
    assert len({frozenset(tokens) for tokens in bursts}) == 8  # then the first comes again
    assert bursts[8] == bursts[0]
    assert all(16 <= token < 250 for prompt in prompts for token in prompt)
    later = DomainWorkload(100, 1, prompt_tokens=40, output_tokens=4, burst=5, first=30)
    assert [later.prompt(index) for index in range(15)] == prompts[30:]


def test_prompts_are_taken_from_texts() -> None:
    texts = [range(100, 150), range(300, 390)]
    workload = TextWorkload(100, 1, 20, 4, burst=3, texts=texts)
    prompts = [workload.prompt(index) for index in range(60)]
    assert len({tuple(prompt) for prompt in prompts}) > 30
    for index, prompt in enumerate(prompts):
        text = texts[index // 3 % 2]
        assert len(prompt) == 20
        # In a row; the end goes on at the beginning.
        begin = text.index(prompt[0])
        assert prompt == [*text, *text][begin : begin + 20]


def test_a_text_that_is_too_short_is_named() -> None:
    check_texts([("long.txt", range(64))], 32)
    with pytest.raises(
        ConfigError, match=r"short\.txt: 63 tokens, and prompts of 32 need at least 64"
    ):
        check_texts([("long.txt", range(64)), ("short.txt", range(63))], 32)


def test_reversed_arrivals() -> None:
    assert reversed_gaps([0.0, 1.0, 5.0]) == [0.0, 4.0, 5.0]

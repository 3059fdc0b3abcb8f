"""Log-probabilities of answers and prompts, compared with a plain forward pass of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import pytest
import torch

from attention_client.generation import sequential
from decoding import greedy
from frontend.requests.logprobs import TokenTexts
from http_box import CHAT, VOCABULARY, Box, events, tiny_model

pytestmark = pytest.mark.integration

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")  # the last one has no paged attention
# 70 tokens: prefilled in parts of 32.
LONG = [(7 * i * i + 3 * i) % 200 for i in range(70)]


class Reference:
    """The same model outside the server."""

    def __init__(self, kind: str) -> None:
        self.model = tiny_model(kind)

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """The distribution (T, V) after each token."""
        logits = self.model(torch.tensor([tokens])).logits[0].float()
        return torch.log_softmax(logits, dim=-1)


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, boxes: Callable[[str], Box]) -> tuple[Box, Reference]:
    return boxes(request.param), Reference(request.param)


def close(got: list[float], expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.as_tensor(expected), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_the_answer(both: tuple[Box, Reference], temperature: float) -> None:
    box, reference = both
    prompt = box.tokenizer("Hello")["input_ids"]
    fields = {"temperature": temperature, "seed": 4, "max_tokens": 12}
    body = {"model": "tiny", "messages": CHAT["messages"]} | fields
    chat = box.openai.chat.completions.create(
        **body, logprobs=True, top_logprobs=5, extra_body={"ignore_eos": True}
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 12
    rendered = box.tokenizer("[user] hi\n[assistant] ")["input_ids"]
    texts = TokenTexts(box.tokenizer)
    token_of = {texts.data(token): token for token in range(VOCABULARY)}
    tokens = [token_of[bytes(each.bytes)] for each in content]
    expected_TV = reference.logprobs(rendered + tokens)[len(rendered) - 1 : -1]
    close([each.logprob for each in content], expected_TV.gather(1, torch.tensor([tokens]).T)[:, 0])
    for each, row_V in zip(content, expected_TV, strict=True):
        assert len(each.top_logprobs) == 5
        close([top.logprob for top in each.top_logprobs], row_V.topk(5).values)
        if temperature == 0:
            assert each.top_logprobs[0].token == each.token
            assert each.top_logprobs[0].logprob == each.logprob
    data = bytes(byte for each in content for byte in each.bytes)
    assert data.decode(errors="replace") == box.tokenizer.decode(tokens)

    whole = box.complete(prompt, logprobs=2, **fields)["choices"][0]
    logprobs = whole["logprobs"]
    assert {len(values) for values in logprobs.values()} == {12}
    assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][0] == 0
    assert box.complete(prompt, **fields)["choices"][0]["text"] == whole["text"]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_tokens_of_the_prompt(
    both: tuple[Box, Reference], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, reference = both
    monkeypatch.setattr(sequential, "_PART", 32)
    expected_TV = reference.logprobs(LONG)
    expected = expected_TV[:-1].gather(1, torch.tensor([LONG[1:]]).T)[:, 0]
    for _ in range(2):  # the second time the prompt's keys and values are cached
        choice = box.complete(LONG, echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["text"].startswith(box.tokenizer.decode(LONG))
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(LONG) + max_tokens}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        close(logprobs["token_logprobs"][1 : len(LONG)], expected)
        best_T = expected_TV[:-1].amax(dim=-1)
        close([max(top.values()) for top in logprobs["top_logprobs"][1 : len(LONG)]], best_T)
    usage = box.complete(LONG, echo=True, logprobs=1, max_tokens=max_tokens)["usage"]
    assert usage == {
        "prompt_tokens": len(LONG),
        "completion_tokens": max_tokens,
        "total_tokens": len(LONG) + max_tokens,
    }


def harness_scores(choices: list[dict[str, Any]], contexts: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval's `local-completions` reads from an answer: sum of log-probabilities, is greedy."""
    scores = []
    for choice, context in zip(sorted(choices, key=itemgetter("index")), contexts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(
            logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)
        )
        scores.append((sum(logprobs), greedy))
    return scores


def test_an_evaluation_harness(both: tuple[Box, Reference]) -> None:
    """Several prompts per request, each a context and its continuation."""
    box, reference = both
    likely = LONG[:20] + greedy(reference.model, LONG[:20], 6)
    prompts = [LONG[:30], likely, LONG[5:45], LONG[:33]]
    contexts = [20, 20, 1, 32]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = box.http.post("/v1/completions", json=body | {"echo": True}).json()
    got = harness_scores(answer["choices"], contexts)
    for prompt, context, (total, is_greedy) in zip(prompts, contexts, got, strict=True):
        rows_TV = reference.logprobs(prompt)[context - 1 : -1]
        expected = rows_TV.gather(1, torch.tensor([prompt[context:]]).T)[:, 0]
        close([total], [float(expected.sum())])
        assert is_greedy == (rows_TV.argmax(dim=-1).tolist() == prompt[context:])
    assert [is_greedy for _, is_greedy in got] == [False, True, False, False]


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_the_same_log_probabilities(both: tuple[Box, Reference], echo: bool) -> None:
    box, _ = both
    body = {"prompt": "zz tép", "max_tokens": 20, "logprobs": 3, "echo": echo, "ignore_eos": True}
    whole = box.http.post("/v1/completions", json=body).json()["choices"][0]
    chunks = events(box.http.post("/v1/completions", json=body | {"stream": True}).text)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            joined[name] += values
    for name in ("tokens", "text_offset"):
        assert joined[name] == whole["logprobs"][name]
    assert joined["token_logprobs"] == pytest.approx(whole["logprobs"]["token_logprobs"], abs=2e-4)
    chat = CHAT | {"max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    content = box.openai.chat.completions.create(**chat).choices[0].logprobs.content
    streamed = [
        record
        for chunk in box.openai.chat.completions.create(**chat, stream=True)
        if chunk.choices[0].logprobs is not None
        for record in chunk.choices[0].logprobs.content
    ]
    assert [each.bytes for each in streamed] == [each.bytes for each in content]


def test_special_tokens_and_offsets(box: Box) -> None:
    end = box.tokenizer.eos_token_id
    prompt = [*box.tokenizer("aé")["input_ids"], end, *box.tokenizer("b")["input_ids"]]
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
    choice = box.complete(prompt, skip_special_tokens=False, **fields)["choices"][0]
    assert choice["text"] == "aé</s>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 6]
    assert choice["logprobs"]["tokens"] == ["a", "\ufffd", "\ufffd", "</s>", "b"]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    assert box.complete("Hello", logprobs=None)["choices"][0]["logprobs"] is None


def test_other_requests_keep_their_answers(box: Box) -> None:
    """Scored prompts, reports and plain requests in one batch."""

    def ask(index: int) -> tuple[str, dict[str, Any]]:
        prompt = ("Hello", "abc", "zz top")[index % 3]
        fields = ({}, {"logprobs": 5}, {"echo": True, "logprobs": 1})[index % 4 % 3]
        return prompt, box.complete(prompt, **fields)["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    for prompt, choice in answers:
        assert choice["text"].removeprefix(prompt) == box.text(prompt)


def test_evicted_prompts_are_scored_once(evicted: list[str]) -> None:
    """More tokens than the cache holds: requests leave the cache, come back and report as if alone."""
    reference = Reference("qwen3_moe")
    with Box() as box:
        prompts = [[(11 * i + j * j) % 200 for j in range(40)] for i in range(8)]

        def ask(prompt: list[int]) -> dict[str, Any]:
            return box.complete(prompt, echo=True, logprobs=1, max_tokens=60)["choices"][0]

        with ThreadPoolExecutor(8) as pool:
            choices = list(pool.map(ask, prompts))
        for prompt, choice in zip(prompts, choices, strict=True):
            assert len(choice["logprobs"]["token_logprobs"]) == 100
            rows_TV = reference.logprobs(prompt)[:-1]
            expected = rows_TV.gather(1, torch.tensor([prompt[1:]]).T)[:, 0]
            close(choice["logprobs"]["token_logprobs"][1:40], expected)
            assert all(math.isfinite(each) for each in choice["logprobs"]["token_logprobs"][40:])
        assert evicted

"""Fields of vLLM that change tokens, texts and reports."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from http_box import CHAT, END, Box, error_of, events

pytestmark = pytest.mark.integration

LETTERS = range(33, 60)  # tokens that are letters


def tokens_of(box: Box, **fields: Any) -> list[int]:
    answer = box.complete(return_token_ids=True, **fields)
    return list(answer["choices"][0]["token_ids"])


def chat(box: Box, **fields: Any) -> Any:
    response = box.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 6} | fields)
    assert response.status_code == 200, response.text
    return response


def test_allowed_tokens(engine: Box) -> None:
    assert set(tokens_of(engine, allowed_token_ids=[*LETTERS])) <= set(LETTERS)
    drawn = tokens_of(
        engine, allowed_token_ids=[40, 41], temperature=2.0, seed=1, logit_bias={"7": 100}
    )
    assert set(drawn) == {40, 41}
    # A grammar may end the answer.
    guided = {"regex": "[A-Za-z0-9]{6}", "ignore_eos": False, "temperature": 2.0, "seed": 3}
    spelled = tokens_of(engine, allowed_token_ids=[33, 34], **guided)
    assert set(spelled[:-1]) <= {33, 34}
    assert (len(spelled), spelled[-1]) == (7, END)


def test_bad_words(engine: Box) -> None:
    letters = {"allowed_token_ids": [*LETTERS]}
    before = tokens_of(engine, **letters)
    first, second = engine.tokenizer.decode(before[:1]), engine.tokenizer.decode(before[:2])
    assert before[0] not in tokens_of(engine, bad_words=[first], **letters)
    # Only the second token of the word is banned, after the first one.
    after = tokens_of(engine, bad_words=[second], **letters)
    assert after[0] == before[0]
    assert tuple(before[:2]) not in set(itertools.pairwise(after))
    assert tokens_of(engine, bad_words=["never written"], **letters) == before
    guided = {"regex": "(ab|ac){3}", "ignore_eos": False, "temperature": 2.0, "seed": 3}
    assert engine.complete(bad_words=["ab"], **guided)["choices"][0]["text"] == "acacac"
    body = {"prompt": "a", "bad_words": ["b"], "regex": "abc"}
    response = engine.http.post("/v1/completions", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "bad_words")


def test_token_ids_of_completions(box: Box) -> None:
    prompts = ["Hello", "abc"]
    answer = box.complete(prompts, return_token_ids=True, n=2, max_tokens=5)
    streamed = box.http.post(
        "/v1/completions",
        json={"prompt": prompts, "n": 2, "max_tokens": 5, "ignore_eos": True, "stream": True}
        | {"return_token_ids": True},
    )
    chunks = [choice for chunk in events(streamed.text) for choice in chunk["choices"]]
    for index, choice in enumerate(answer["choices"]):
        prompt = prompts[index // 2]
        assert choice["token_ids"] == box.expected[prompt][:5]
        assert choice["prompt_token_ids"] == box.tokenizer(prompt)["input_ids"]
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in own for token in chunk["token_ids"]] == choice["token_ids"]
        given = [chunk.get("prompt_token_ids") for chunk in own]
        assert given == [choice["prompt_token_ids"], *[None] * (len(own) - 1)]
    assert "token_ids" not in box.complete()["choices"][0]


def test_token_ids_of_a_chat(box: Box) -> None:
    answer = chat(box, return_token_ids=True).json()
    rendered = box.tokenizer("[user] hi\n[assistant] ")["input_ids"]
    assert answer["prompt_token_ids"] == rendered
    (choice,) = answer["choices"]
    assert (
        box.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        == (choice["message"]["content"])
    )
    first, *others = events(chat(box, return_token_ids=True, stream=True).text)
    assert first["prompt_token_ids"] == rendered
    assert not any("prompt_token_ids" in chunk for chunk in others)
    ids = [
        token for chunk in (first, *others) for c in chunk["choices"] for token in c["token_ids"]
    ]
    assert ids == choice["token_ids"]


def test_tokens_as_token_ids(box: Box) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = box.complete(logprobs=2, max_tokens=4, **fields)["choices"][0]
    report = choice["logprobs"]
    assert report["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(
        re.fullmatch(r"token_id:\d+", name) for top in report["top_logprobs"] for name in top
    )
    assert (
        report["text_offset"]
        == box.complete(logprobs=2, max_tokens=4)["choices"][0]["logprobs"]["text_offset"]
    )
    (choice,) = chat(box, logprobs=True, top_logprobs=1, **fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(each["top_logprobs"][0]["token"].startswith("token_id:") for each in content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("padding", ["", "m" * 70_000])  # the prompt worker reads a large body
def test_echo_of_a_chat(box: Box, stream: bool, padding: str) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "Once upon"}]

    def content(messages: Any, **fields: Any) -> str:
        response = chat(box, messages=messages, stream=stream, metadata=padding, **fields)
        if not stream:
            return str(response.json()["choices"][0]["message"]["content"])
        choices = [choice for chunk in events(response.text) for choice in chunk["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    assert content(said, echo=True) == "Once upon" + content(said)
    go_on = {"continue_final_message": True}
    assert content(said, echo=True, **go_on) == "Once upon" + content(said, **go_on)
    assert content(CHAT["messages"], echo=True) == content(CHAT["messages"])

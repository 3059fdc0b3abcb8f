"""/tokenize, /detokenize, /version and /ping, in vLLM's form."""

from __future__ import annotations

from typing import Any

import pytest

from eaas import __version__
from http_box import END, Box, error_of

pytestmark = pytest.mark.integration


def post(box: Box, path: str, **body: Any) -> Any:
    response = box.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_of_a_prompt(box: Box) -> None:
    tokens = box.tokenizer("héllo")["input_ids"]
    room = box.http.get("/v1/models/tiny").json()["max_model_len"]
    answer = {"count": 6, "max_model_len": room, "tokens": tokens, "token_strs": None}
    assert post(box, "/tokenize", prompt="héllo", model="tiny") == answer
    strings = box.tokenizer.convert_ids_to_tokens(tokens)
    named = post(box, "/tokenize", prompt="héllo", return_token_strs=True)
    assert named == answer | {"token_strs": strings}
    assert post(box, "/tokenize", prompt="")["tokens"] == []


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "\n[assistant] "),
        ({"add_generation_prompt": True}, "\n[assistant] "),
        ({"add_generation_prompt": False}, "\n"),
        ({"continue_final_message": True}, ""),
    ],
)
def test_tokens_of_messages(box: Box, fields: dict[str, Any], end: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = post(box, "/tokenize", messages=messages, **fields)
    assert box.tokenizer.decode(answer["tokens"]) == f"[user] hi{end}"
    chat = {"messages": messages, "max_tokens": 1} | fields
    usage = box.http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert usage["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize("length", [1000, 9000, 60_000])
def test_long_texts_go_there_and_back(box: Box, length: int) -> None:
    text = ("añ" * length)[:length]
    answer = post(box, "/tokenize", prompt=text, return_token_strs=True)
    assert answer["tokens"] == box.tokenizer(text)["input_ids"]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    some = answer["tokens"][: length // 6]
    assert post(box, "/detokenize", tokens=some) == {"prompt": box.tokenizer.decode(some)}


def test_special_tokens_are_shown(box: Box) -> None:
    assert post(box, "/detokenize", tokens=[END]) == {"prompt": "</s>"}
    assert post(box, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "b"}, 400, "chat_template"),
        (
            "/tokenize",
            {"prompt": "a", "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "a" * 100_000}, 413, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ],
)
def test_wrong_bodies_are_refused(
    box: Box, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = box.http.post(path, json=body)
    assert response.status_code == status
    assert error_of(response)["param"] == param


def test_unknown_fields_are_named(box: Box) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = box.http.post(path, json=body | {"odd": 1})
        assert response.headers["x-eaas-ignored-fields"] == "odd"


def test_version_and_ping(box: Box) -> None:
    assert box.http.get("/version").json() == {"version": __version__}
    for method in ("GET", "POST"):
        assert box.http.request(method, "/ping").status_code == 200
    box.good = (False, "gone")
    for method in ("GET", "POST"):
        assert box.http.request(method, "/ping").status_code == 503

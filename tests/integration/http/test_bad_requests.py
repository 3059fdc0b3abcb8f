"""Invalid requests get a 4xx answer in OpenAI's form; paths of other servers are told what to use."""

from __future__ import annotations

import openai
import pytest

from http_box import CHAT, Box, error_of

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", b"", 400),
        ("/v1/completions", b"[1, 2]", 400),
        ("/v1/completions", b'"text"', 400),
        ("/v1/completions", b"null", 400),
        ("/v1/completions", b"{}", 400),
        ("/v1/completions", b"[" * 20_000, 400),
        ("/v1/completions", b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("/v1/completions", b'{"prompt": "a", "temperature": Infinity}', 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}', 400),
        ("/v1/completions", b'{"prompt": "a", "model": "b\\u0000"}', 404),
        ("/v1/completions", b'{"prompt": ""}', 400),
        ("/v1/completions", b'{"prompt": [5, 260]}', 400),
        ("/v1/completions", b'{"prompt": [-1]}', 400),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a" * 100_000), 413),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "refuse"}]}', 400),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "tools":'
            b' [{"type": "function", "function": {"name": "f"}}]}',
            400,
        ),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}],'
            b' "chat_template_kwargs": {"tokenize": true}}',
            400,
        ),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ],
)
def test_bad_requests(box: Box, path: str, content: bytes, status: int) -> None:
    response = box.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error_of(response)


def test_other_ways_to_be_wrong(box: Box) -> None:
    body = b'{"prompt": "a"}'
    for media_type in ("text/plain", ""):
        response = box.http.post(
            "/v1/completions", content=body, headers={"Content-Type": media_type}
        )
        assert response.status_code == 415
        error_of(response)
    response = box.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 200
    response = box.http.get("/v1/completions")
    assert response.status_code == 405
    error_of(response)
    pieces = (b"x" * 10_000 for _ in range(50))  # no Content-Length
    response = box.http.post(
        "/v1/completions", content=pieces, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


def test_requests_beyond_the_context_length_are_refused(box: Box) -> None:
    limit = 24 * 8
    response = box.http.post("/v1/completions", json={"prompt": "a" * 100, "max_tokens": 93})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    assert "193" in error["message"]
    response = box.http.post("/v1/completions", json={"prompt": "a" * limit})
    assert response.status_code == 400
    box.complete("a" * 100, max_tokens=92)  # exactly fits
    assert box.complete("a" * (limit - 1), max_tokens=1)["usage"]["total_tokens"] == limit


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/chat/completions", "Use /v1/chat/completions: "),
        ("POST", "/completions", "Use /v1/completions: "),
        ("GET", "/models", "Use /v1/models: "),
        ("GET", "/models/tiny", "Use /v1/models/tiny: "),
        ("POST", "/responses", "Use /v1/responses: "),
        ("POST", "/v1/v1/chat/completions", "Use /v1/chat/completions: "),
        ("POST", "/api/v1/chat/completions", "Use /v1/chat/completions: "),
        ("POST", "/v1/chat/completions/chat/completions", "Use /v1/chat/completions: "),
        ("POST", "/v1/engines/tiny/completions", "Use /v1/completions: "),
        ("POST", "/openai/deployments/tiny/chat/completions?api-version=1", "not Azure's"),
        ("POST", "/openai/deployments/tiny/embeddings", "use another server"),
        ("POST", "/v1/embeddings", "use another server"),
        ("POST", "/embeddings", "use another server"),
        ("POST", "/v1/rerank", "use another server"),
        ("POST", "/v1/audio/transcriptions", "use another server"),
        ("POST", "/v1/images/generations", "use another server"),
        ("POST", "/api/chat", "Ollama"),
        ("POST", "/api/generate", "Ollama"),
        ("GET", "/api/tags", "Ollama"),
        ("GET", "/v1", "/openapi.json lists all paths"),
        ("POST", "/generate", "/openapi.json lists all paths"),
        ("GET", "/%ff/../%00", "/openapi.json lists all paths"),
        ("GET", "/" + "a/" * 2000, "/openapi.json lists all paths"),
    ],
)
def test_the_hint(box: Box, method: str, path: str, hint: str) -> None:
    answer = box.http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    error = error_of(answer)
    assert hint in error["message"]
    assert error["type"] == "not_found_error"
    if "Use " in hint or "Ollama" in hint:
        assert f"{box.url}/v1" in error["message"]


def test_a_client_with_a_wrong_base_url_reads_the_hint(box: Box) -> None:
    client = openai.OpenAI(base_url=box.url, api_key="none", max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match=f"base URL to {box.url}/v1"):
        client.chat.completions.create(**CHAT)


def test_every_served_name_is_listed(box: Box) -> None:
    models = box.openai.models.list().data
    assert [model.id for model in models] == ["tiny", "/models/tiny"]
    for model in models:
        # Names hold slashes.
        assert box.http.get(f"/v1/models/{model.id}").json() == model.to_dict()
        assert model.to_dict()["root"] == "tiny"
        answer = box.openai.chat.completions.create(**CHAT | {"model": model.id}, max_tokens=1)
        assert answer.model == "tiny"
    with pytest.raises(openai.NotFoundError, match="nope"):
        box.openai.chat.completions.create(**CHAT | {"model": "nope"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        box.openai.chat.completions.create(**CHAT | {"temperature": 3})
    missing = box.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"

"""Paths that clients of other servers ask for: the answer says what to use."""

from __future__ import annotations

import openai
import pytest

from http_box import CHAT, Box, error_of

pytestmark = pytest.mark.integration


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
    missing = box.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"

"""Invalid requests get a 4xx answer in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_client.serving.prompts.bodies import ChatRequest, CompletionRequest
from http_box import Box, error_of

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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields])
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(st.characters(), max_size=9) | st.lists(st.integers(-1, 261), max_size=4),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
                optional={"content": st.text(st.characters(), max_size=9)},
            ),
            max_size=3,
        ),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(-1, 2**40),
        "stop": st.lists(st.text(max_size=2), max_size=3),
        "stream": st.booleans(),
        "chat_template_kwargs": st.dictionaries(st.text(max_size=5), VALUES, max_size=2),
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    SENSIBLE,
    st.dictionaries(NAMES, VALUES, max_size=2) | st.just({}),
)
def test_no_body_makes_a_500(
    shared_box: Box, path: str, sensible: dict[str, Any], odd: dict[str, Any]
) -> None:
    body = {"max_tokens": 2} | sensible | odd
    response = shared_box.http.post(
        path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)

"""Invalid requests get a 4xx answer in OpenAI's form."""

from __future__ import annotations

import pytest

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

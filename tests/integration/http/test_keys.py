"""The endpoint with API keys."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from browser import open_page
from dashboard_process import Stage
from eaas.net.api_keys import ApiKeys
from frontend.dashboard.mount import Dashboard
from http_box import CHAT, LIMITS, Box, error_of
from raw_http import connected, read_all, read_until

pytestmark = pytest.mark.integration

KEY = "sk-of-this-test-0123456789"
HEAD_S = 0.5


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def locked(keys_file: Path) -> Iterator[Box]:
    limits = dataclasses.replace(LIMITS, head_timeout_s=HEAD_S)
    with Box(limits=limits, keys=ApiKeys(keys_file), dashboard=Dashboard(Stage)) as box:
        yield box


WRONG_KEYS = (None, "", "Bearer", "Bearer none", f"Basic {KEY}", KEY, f"Bearer {KEY}x")
CLOSED_PATHS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/eaas/v1/status"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//metrics"),
    ("OPTIONS", "/v1/models"),
)


@pytest.mark.parametrize(
    ("method", "path", "shown"),
    [
        *((method, path, None) for method, path in CLOSED_PATHS),
        *(("GET", "/v1/models", shown) for shown in WRONG_KEYS[1:]),
    ],
)
def test_without_a_key(locked: Box, method: str, path: str, shown: str | None) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    response = httpx.request(method, f"{locked.url}{path}", headers=headers, json={"prompt": "a"})
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert KEY not in response.text
    assert not shown or shown not in response.text or shown == "Bearer"


def test_with_a_key(locked: Box, keys_file: Path) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT, max_tokens=2).choices
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**CHAT)
    twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer x")]
    assert httpx.get(f"{locked.url}/v1/models", headers=twice).status_code == 401
    # The file is read again after a change.
    keys_file.write_text("sk-the-next-one\n")
    asked = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{locked.url}/v1/models", headers=asked).status_code == 401
    asked = {"Authorization": "Bearer sk-the-next-one"}
    assert httpx.get(f"{locked.url}/v1/models", headers=asked).status_code == 200
    keys_file.write_text(f"{KEY}\n")


def test_the_password_opens_the_page_only(locked: Box) -> None:
    """A browser sends the key as the password of HTTP Basic."""
    for path in ("/", "/page/page.js", "/eaas/v1/snapshot"):
        refused = httpx.get(f"{locked.url}{path}")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for wrong in (("me", "no"), (KEY, "")):
            assert httpx.get(f"{locked.url}{path}", auth=wrong).status_code == 401
        assert httpx.get(f"{locked.url}{path}", auth=("me", KEY)).status_code == 200
    assert httpx.get(f"{locked.url}/v1/models", auth=("me", KEY)).status_code == 401
    # Browsers name the sites of a request; the page's own may show the password, too.
    for site, status in (
        ("same-origin", 200),
        ("same-site", 401),
        ("cross-site", 401),
        ("none", 401),
    ):
        answer = httpx.get(
            f"{locked.url}/v1/models", auth=("me", KEY), headers={"sec-fetch-site": site}
        )
        assert answer.status_code == status


def test_the_page_chats_with_the_browsers_password(locked: Box, browser: Any) -> None:
    password = {"username": "me", "password": KEY}
    with open_page(browser, locked.url, http_credentials=password) as watched:
        watched.page.get_by_text("all is well").wait_for()
        watched.page.get_by_role("button", name="Send").click()
        watched.page.wait_for_function(
            "() => document.querySelector('#answer').innerText.length > 5"
        )
        assert "The answer failed" not in watched.part("answer").inner_text()
        assert watched.part("members").get_by_role("button").count() == 0, (
            "nobody operates by a key"
        )


def test_health_and_metrics_are_open(locked: Box) -> None:
    assert httpx.get(f"{locked.url}/health").json() == {"status": "ok"}
    page = httpx.get(f"{locked.url}/metrics")
    assert page.status_code == 200
    assert 'eaas_http_requests_total{code="401",endpoint="/v1/models"}' in page.text
    assert KEY not in page.text


def test_row_34_a_head_that_does_not_end(locked: Box) -> None:
    """Row 34: slow senders, huge headers: caps hold."""
    for opening in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
        with connected(locked) as slow:
            slow.sendall(opening)
            begun = time.monotonic()
            assert read_all(slow) == b""
            assert time.monotonic() - begun < 10
    with connected(locked) as large:
        large.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000)
        assert read_all(large).startswith(b"HTTP/1.1 431 ")
    # Also if it arrives whole.
    for head in (
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 17_000,
        b"GET /health?" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: x",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join([b"X: " + b"a" * 90] * 200),
    ):
        with connected(locked) as whole:
            whole.sendall(head + b"\r\nConnection: close\r\n\r\n")
            assert read_all(whole).startswith(b"HTTP/1.1 431 ")
    # The rest of a refused request's body does not keep the connection open.
    with connected(locked) as dribbling:
        dribbling.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert dribbling.recv(65_536).startswith(b"HTTP/1.1 401 ")
        deadline = time.monotonic() + 20
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                dribbling.sendall(b"x")
                assert time.monotonic() < deadline
                time.sleep(0.05)
    # A busy connection stays open.
    locked.slow_s = 2 * HEAD_S / 3
    body = {"prompt": "abc", "max_tokens": 3}
    try:
        with httpx.Client(
            base_url=locked.url, headers={"Authorization": f"Bearer {KEY}"}
        ) as client:
            assert client.post("/v1/completions", json=body, timeout=60).status_code == 200
    finally:
        locked.slow_s = 0.0
        locked.http.headers["Authorization"] = f"Bearer {KEY}"
        locked.wait_idle()


def test_an_idle_connection_waits_for_its_next_request(locked: Box) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(locked) as connection:
        for _ in range(2):
            connection.sendall(ask)
            answer = read_until(connection, lambda seen: seen.endswith(b"}"))
            assert answer.startswith(b"HTTP/1.1 200 ")
            # The keep-alive time is longer than the timeout of the headers.
            time.sleep(2 * HEAD_S)
        # The timeout of the headers applies after their first byte.
        connection.sendall(ask[:20])
        begun = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - begun < 20

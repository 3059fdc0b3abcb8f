"""HTTP's own rules, with requests that no client library sends."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Iterator

import pytest

from http_box import Box, error_of
from raw_http import answer_of, connected, exchange, head, post, read_all, read_until
from waiting import eventually

pytestmark = pytest.mark.integration

BODY = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
CLOSE = "Connection: close"


@pytest.fixture(scope="module")
def own_machine_box() -> Iterator[Box]:
    with Box(hosts=()) as box:
        yield box


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(BODY, "/v1/completions", "Transfer-Encoding: chunked"), 400),
        (head("GET /health HTTP/1.1", "Content-Length: 0", "Transfer-Encoding: chunked"), 400),
        (head("POST /nothing HTTP/1.0", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        (head("POST /v1/completions HTTP/1.1", "Content-Length: 3", "Content-Length: 4"), 400),
        (head("POST /v1/completions HTTP/1.1", "Transfer-Encoding: gzip, chunked"), 501),
        (head("GET /health HTTP/1.1", "Host: two"), 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /he alth HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (head("GET http://[::1/health HTTP/1.1"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (head("GET /health HTTP/1.1", "X: " + "a" * 17_000), 431),
        (head("GET /health HTTP/1.1", "X: " + "a" * 3_000_000), 431),
        (head("GET /health?" + "a" * 17_000 + " HTTP/1.1"), 431),
    ],
)
def test_what_is_no_http_ends_the_connection(box: Box, request_bytes: bytes, status: int) -> None:
    with connected(box) as connection:
        # The server may have closed it before the last byte.
        with contextlib.suppress(ConnectionError):
            connection.sendall(request_bytes)
        answer = answer_of(read_all(connection))
    assert answer.status == status
    assert answer.error["message"]
    assert answer.headers["connection"] == "close"


def test_a_broken_body_ends_the_request(box: Box) -> None:
    with connected(box) as connection:
        fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
        connection.sendall(head("POST /v1/completions HTTP/1.1", *fields) + b"5\r\n{pr")
        time.sleep(0.05)
        connection.sendall(b"om---\r\n")
        assert answer_of(read_all(connection)).status == 400


@pytest.mark.parametrize("url", ["http://localhost:1", "HTTP://LOCALHOST", "http://127.0.0.1:80"])
def test_a_target_may_be_a_url(own_machine_box: Box, url: str) -> None:
    box = own_machine_box
    answer = exchange(box, head(f"GET {url}/v1/models HTTP/1.1", CLOSE))
    assert json.loads(answer.body) == box.http.get("/v1/models").json()
    sent = post(BODY, f"{url}/v1/completions?a=b", CLOSE)
    assert json.loads(exchange(box, sent).body)["choices"][0]["text"] == box.text("Hello", 8)
    assert exchange(box, head(f"GET {url} HTTP/1.1", CLOSE)).status == 404  # no page


def test_the_host_of_a_url_counts(own_machine_box: Box) -> None:
    for url in ("http://evil.example", "http://evil.example@localhost", "http://"):
        answer = exchange(own_machine_box, head(f"GET {url}/v1/models HTTP/1.1", CLOSE))
        assert answer.status == (403 if "evil" in url else 200), url
    # The Host header says localhost; it does not matter then.


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("HEAD", "/v1/completions", {"POST"}),
        ("PUT", "/tokenize", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ("PUT", "/ping", {"GET", "HEAD", "POST"}),
        ("POST", "/metrics", {"GET", "HEAD"}),
        ("FOO", "/health", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_names_the_right_ones(
    box: Box, method: str, path: str, allowed: set[str]
) -> None:
    answer = box.http.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    if method != "HEAD":
        assert "/" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/health", "/live", "/ping", "/version", "/metrics"]
)
def test_head_is_get_without_a_body(box: Box, path: str) -> None:
    with connected(box) as connection:
        connection.sendall(head(f"HEAD {path} HTTP/1.1") + head(f"GET {path} HTTP/1.1", CLOSE))
        first, _, rest = read_all(connection).partition(b"\r\n\r\n")
    asked, got = answer_of(first), answer_of(rest)
    assert asked.status == got.status == 200
    assert got.body
    assert asked.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":
        assert asked.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "gzip, gzip"])
def test_compressed_bodies_are_refused_with_a_reason(box: Box, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    content = gzip.compress(json.dumps(BODY).encode())
    answer = box.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 415
    assert encoding.lower() in error_of(answer)["message"]
    headers["Content-Encoding"] = "identity"
    answer = box.http.post("/v1/completions", content=json.dumps(BODY), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_http_2_changes_nothing(
    box: Box, chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    offer = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAAB",
    )
    data = json.dumps(BODY).encode()
    fields = ("Content-Type: application/json", *offer)
    with connected(box) as connection:
        for _ in range(2):  # the connection stays
            if chunked:
                line = "POST /v1/completions HTTP/1.1"
                connection.sendall(head(line, *fields, "Transfer-Encoding: chunked"))
                time.sleep(0.05)
                connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
            else:
                connection.sendall(post(BODY, "/v1/completions", *offer))
            answer = answer_of(read_until(connection, lambda seen: seen.endswith(b"}}")))
            assert json.loads(answer.body)["choices"][0]["text"] == box.text("Hello", 8)
    assert not caplog.records


@pytest.mark.parametrize("http", ["1.0", "1.1"])
def test_a_client_may_close_its_sending_side(box: Box, http: str) -> None:
    asked = exchange(box, head(f"GET /v1/models HTTP/{http}"), half_close=True)
    assert json.loads(asked.body) == box.http.get("/v1/models").json()
    streamed = BODY | {"stream": True, "max_tokens": 24}
    box.slow_s = 0.02
    if http == "1.1":
        answer = exchange(box, post(BODY | {"max_tokens": 24}), half_close=True)
        assert json.loads(answer.body)["choices"][0]["text"] == box.text("Hello")
        assert answer.interim
        assert b"[DONE]" in exchange(box, post(streamed), half_close=True).body
        # Two requests at once.
        with connected(box) as connection:
            connection.sendall(head("GET /version HTTP/1.1") + post(BODY))
            connection.shutdown(socket.SHUT_WR)
            assert b'"finish_reason":"length"' in read_all(connection)
    with connected(box) as connection:
        connection.sendall(post(streamed, http=http))
        data = read_until(connection, lambda seen: b"data:" in seen)
        connection.shutdown(socket.SHUT_WR)
        assert b"[DONE]" in data + read_all(connection)


@pytest.mark.parametrize(
    ("http", "stream", "waits"),
    [("1.1", False, False), ("1.0", False, False), ("1.1", True, False), ("1.1", True, True)],
)
def test_a_client_that_leaves_is_told_from_one_that_half_closes(
    http: str, stream: bool, waits: bool
) -> None:
    with Box() as box:
        box.slow_s = 0.05
        body = BODY | {"max_tokens": 150, "stream": stream}
        with contextlib.ExitStack() as stack:
            if waits:  # the first request takes the whole cache
                first = stack.enter_context(connected(box))
                first.sendall(post(body))
                read_until(first, lambda seen: b"data:" in seen)
            with connected(box) as connection:
                connection.sendall(post(body, http=http))
                if stream:
                    read_until(connection, lambda seen: b"\r\n\r\n" in seen)
                else:
                    time.sleep(0.3)
            eventually(lambda: box.open_requests() <= int(waits), 4.0, "its request's end")
        box.slow_s = 0.0

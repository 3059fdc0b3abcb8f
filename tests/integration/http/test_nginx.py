"""A real nginx in front of the endpoint, with its defaults: HTTP/1.0, buffers, a limit of silence."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from http_box import LIMITS, Box
from waiting import eventually

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
]

PAGE = Path(__file__).parents[3] / "docs" / "proxies.md"
CONFIG = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {}
http {
  access_log off;
  client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
  server { listen unix:DIRECTORY/nginx.sock; location / { proxy_pass http://ADDRESS; SETTINGS } }
}
"""


def settings_of_the_page() -> str:
    """What the page's `location` sets, with its long time."""
    location = PAGE.read_text().partition("location /v1/ {")[2].partition("}")[0]
    lines = [line.strip() for line in location.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("proxy_pass"))


# The default of the time without a byte is 60 s.
SETTINGS = {"defaults": "proxy_read_timeout 2s;", "the page's": settings_of_the_page()}
BODY = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(limits=dataclasses.replace(LIMITS, ping_s=0.5), hosts=()) as box:
        yield box


@pytest.fixture(scope="module", params=SETTINGS)
def proxy(box: Box, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of nginx."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "nginx.conf"
        filled = CONFIG.replace("SETTINGS", SETTINGS[request.param])
        filled = filled.replace("ADDRESS", box.server.address).replace("DIRECTORY", directory)
        config.write_text(filled)
        nginx = subprocess.Popen([str(NGINX), "-p", directory, "-c", str(config)])
        try:
            socket = Path(directory) / "nginx.sock"
            eventually(socket.is_socket, 20.0, "nginx's start")
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(
                transport=transport, base_url=f"http://{box.server.address}"
            ) as client:
                yield client
        finally:
            nginx.terminate()
            nginx.wait(20)


def test_tokens_arrive_singly(box: Box, proxy: httpx.Client) -> None:
    box.slow_s = 0.1
    try:
        times = []
        with proxy.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            begun = time.monotonic()
            text = ""
            for piece in answer.iter_text():
                times.append(time.monotonic() - begun)
                text += piece
        assert text.endswith("data: [DONE]\n\n")
        assert times[0] < 2.0
        assert len(times) > 5
        assert max(b - a for a, b in itertools.pairwise(times)) < 1.0
    finally:
        box.slow_s = 0.0


def test_a_silent_stream_outlives_the_patience_of_nginx(box: Box, proxy: httpx.Client) -> None:
    box.slow_s = 3.0
    try:
        body = BODY | {"stream": True, "max_tokens": 2}
        text = proxy.post("/v1/completions", json=body, timeout=30).text
        assert text.startswith(": ping\n\n")
        assert text.endswith("data: [DONE]\n\n")
    finally:
        box.slow_s = 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_nginx_ends_its_request(
    box: Box, proxy: httpx.Client, stream: bool
) -> None:
    box.slow_s = 0.1
    try:
        body = BODY | {"stream": stream, "max_tokens": 150}
        with pytest.raises(httpx.ReadTimeout):
            proxy.post("/v1/completions", json=body, timeout=httpx.Timeout(20, read=0.05))
        before = time.monotonic()
        box.wait_idle()
        assert time.monotonic() - before < 5
    finally:
        box.slow_s = 0.0


def test_errors_and_whole_answers_pass_unchanged(box: Box, proxy: httpx.Client) -> None:
    answer = proxy.post("/v1/completions", json=BODY | {"max_tokens": 8})
    assert answer.json()["choices"][0]["text"] == box.text("Hello", 8)
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/chat/completions", 404),
        ("POST", "/v1/completions", 400),
    ):
        answer = proxy.request(method, path, json={})
        assert answer.status_code == status
        assert set(json.loads(answer.content)) == {"error"}

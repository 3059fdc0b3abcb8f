"""The page alone, before a fake vLLM behind its middleware; no cluster."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from eaas.membership.cluster_view import MembershipView
from eaas.net.api_keys import ApiKeys
from eaas.types import Member, MemberState, Role
from frontend.access import Access
from frontend.limits import ServeLimits
from frontend.network.server import HttpServer
from frontend.page import VllmServer, build_page_app

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [], "stream": True}


@dataclass
class FakeVllm:
    """vLLM's server: its answers have two parts, the second of which waits for `go`."""

    asked: list[Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    breaks: bool = False

    def app(self) -> Starlette:
        async def chat(request: Request) -> Response:
            self.asked.append(request)
            self.bodies.append(await request.json())
            if request.headers.get("authorization") == "Bearer wrong":
                return JSONResponse({"error": "wrong"}, 401)
            return StreamingResponse(self.parts(), media_type="text/event-stream")

        def metrics(_request: Request) -> Response:
            return PlainTextResponse("vllm:generation_tokens_total 5.0\n")

        app = Starlette(
            routes=[
                Route(CHAT, chat, methods=["POST"]),
                Route("/metrics", metrics),
            ]
        )
        app.state.end_requests, app.state.close_pages = self.go.set, None
        return app

    async def parts(self) -> Any:
        try:
            yield "data: one\n\n"
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            if self.breaks:
                raise RuntimeError("vLLM fails")
            yield "data: two\n\n"
        finally:
            self.left.set()


def view_of(*members: Member) -> MembershipView:
    return MembershipView(1, {member.id: member for member in members})


def client(
    name: str, address: str, state: MemberState = MemberState.SERVING, **more: str
) -> Member:
    return Member(
        id=name,
        role=Role.ATTENTION_CLIENT,
        pid=1,
        host="h",
        address=address,
        state=state,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def start() -> Iterator[Callable[[Starlette], str]]:
    with ExitStack() as stack:

        def start(app: Starlette) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = HttpServer(app, listener, ServeLimits())
            server.start()
            stack.callback(server.stop, 0.2)
            return server.address

        yield start


@pytest.fixture
def vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def page(start: Callable[[Starlette], str], vllm: FakeVllm) -> Iterator[httpx.Client]:
    server = VllmServer()
    server.follow(view_of(client("vllm", start(vllm.app()))))
    app = build_page_app(server, lambda: {"epoch": 3}, Access(hosts=["box"]), None)
    with httpx.Client(base_url=f"http://{start(app)}", timeout=20) as http:
        yield http
    vllm.go.set()


def test_an_answer_streams_with_its_request_as_sent(page: httpx.Client, vllm: FakeVllm) -> None:
    headers = {"Authorization": "Bearer key", "Cookie": "eaas-operator-1=token"}
    with page.stream("POST", CHAT, json=BODY, headers=headers) as answer:
        parts = answer.iter_text()
        assert next(parts) == "data: one\n\n"
        vllm.go.set()
        assert "".join(parts) == "data: two\n\n"
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert vllm.bodies == [BODY]
    (request,) = vllm.asked
    assert request.headers["authorization"] == "Bearer key"
    # The operator's token stays here.
    assert "cookie" not in request.headers


def test_vllms_refusal_is_the_answer(page: httpx.Client) -> None:
    refused = page.post(CHAT, json=BODY, headers={"Authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()) == (401, {"error": "wrong"})


def test_vllm_stops_when_the_client_leaves(page: httpx.Client, vllm: FakeVllm) -> None:
    with page.stream("POST", CHAT, json=BODY) as answer:
        next(answer.iter_text())
    assert vllm.left.wait(10)


def test_an_answer_that_breaks_off_ends_with_an_error(page: httpx.Client, vllm: FakeVllm) -> None:
    vllm.breaks = True
    vllm.go.set()
    answer = page.post(CHAT, json=BODY)
    one, last = answer.text.strip().split("\n\n")
    assert one == "data: one"
    assert "vLLM does not answer" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_its_own_paths_and_vllms(page: httpx.Client, vllm: FakeVllm) -> None:
    assert page.get("/eaas/v1/status").json() == {"epoch": 3}
    assert page.get("/metrics").text == "vllm:generation_tokens_total 5.0\n"
    assert page.get("/live").status_code == 200
    for path in ("/v1/embeddings", "/", "/eaas/v1/snapshot"):
        refused = page.post(path, json={})
        assert refused.status_code == 404
        assert "vLLM's API is at http://127.0.0.1:" in refused.json()["error"]["message"]
    for wrong in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert page.post(CHAT, json=BODY, headers=wrong).status_code == 403
    assert not vllm.asked


def test_every_path_needs_a_key(
    start: Callable[[Starlette], str], vllm: FakeVllm, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").write_text("secret\n")
    keys.chmod(0o600)
    server = VllmServer()
    server.follow(view_of(client("vllm", start(vllm.app()))))
    address = start(build_page_app(server, dict, Access(ApiKeys(keys)), None))
    vllm.go.set()
    with httpx.Client(base_url=f"http://{address}") as http:
        assert http.get("/eaas/v1/status").status_code == 401
        assert http.post(CHAT, json=BODY).status_code == 401
        assert http.get("/metrics").status_code == 200
        shown = {"Authorization": "Bearer secret"}
        assert http.get("/eaas/v1/status", headers=shown).status_code == 200
        # The page's own request with the browser's password.
        own = {"sec-fetch-site": "same-origin"}
        assert http.post(CHAT, json=BODY, headers=own, auth=("me", "secret")).status_code == 200


def test_without_vllm_requests_fail_until_it_serves(
    start: Callable[[Starlette], str], vllm: FakeVllm
) -> None:
    server = VllmServer()
    address = start(build_page_app(server, dict, Access(), None))
    vllm.go.set()
    with httpx.Client(base_url=f"http://{address}") as http:
        answer = http.post(CHAT, json=BODY)
        assert answer.status_code == 503
        assert "eaas vllm" in answer.json()["error"]["message"]
        server.follow(view_of(client("gone", "127.0.0.1:9")))
        assert http.post(CHAT, json=BODY).status_code == 503
        server.follow(view_of(client("vllm", start(vllm.app()))))
        assert http.post(CHAT, json=BODY).status_code == 200


def test_vllm_is_the_client_that_serves_http() -> None:
    server = VllmServer()
    engine = client("a", "h:1", engine_address="h:1")
    joining, old = client("b", "h:2", MemberState.JOINING), client("c", "h:3", MemberState.LEFT)
    server.follow(view_of(engine, joining, old))
    assert server.url == "http://h:2"
    server.follow(view_of(engine, joining, old, client("d", "h:4")))
    assert server.url == "http://h:4"


def test_the_end_of_the_frontend_fails_running_requests(
    start: Callable[[Starlette], str], vllm: FakeVllm
) -> None:
    server = VllmServer()
    server.follow(view_of(client("vllm", start(vllm.app()))))
    address = start(build_page_app(server, dict, Access(), None))
    with httpx.stream("POST", f"http://{address}{CHAT}", json=BODY) as answer:
        parts = answer.iter_text()
        next(parts)
        assert server.requests == 1
        server.end()
        assert "ends" in json.loads("".join(parts).removeprefix("data: "))["error"]["message"]
    assert vllm.left.wait(10)


def test_the_command_needs_a_name_of_the_model() -> None:
    for options in ((), ("--page-only",)):
        words = (sys.executable, "-m", "eaas_cli", "frontend", "--join", "127.0.0.1:1", *options)
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50)
        assert done.returncode == 2
        assert done.stderr == (
            "eaas: error: give --model, or --page-only with --served-model-name\n"
        )

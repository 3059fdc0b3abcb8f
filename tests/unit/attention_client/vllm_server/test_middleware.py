"""The middleware of vLLM's API server before a fake vLLM, and without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from attention_client.engines.vllm import worker_page
from attention_client.vllm_server import middleware as middleware_module
from attention_client.vllm_server.middleware import Endpoint
from attention_client.vllm_server.settings import EndpointSettings
from eaas.control_plane.observer import ClusterObserver
from eaas.types import Member, MemberState, Role

ADDRESS = "127.0.0.1:8000"


def worker(pid: int, name: str = "client") -> Member:
    return Member(
        id=name,
        role=Role.ATTENTION_CLIENT,
        pid=pid,
        host="h",
        address=ADDRESS,
        state=MemberState.SERVING,
    )


class FakeObserver(ClusterObserver):
    """Knows one worker: this process."""

    def __init__(self, *_: Any) -> None:
        self._placement = None
        self._members = ()

    def members(self, timeout_s: float) -> list[Member] | None:
        return [worker(os.getpid())]

    def close(self) -> None:
        pass


def fake_vllm() -> Starlette:
    def health(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    def metrics(request: Request) -> PlainTextResponse:
        assert "accept-encoding" not in request.headers
        return PlainTextResponse("vllm:generation_tokens_total 5.0\n")

    def models(_request: Request) -> JSONResponse:
        return JSONResponse({"data": []})

    async def realtime(socket: Any) -> None:
        await socket.accept()
        await socket.close()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            WebSocketRoute("/v1/realtime", realtime),
        ]
    )
    app.add_middleware(Endpoint)
    return app


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("EAAS_API_KEY", raising=False)
    monkeypatch.setattr(middleware_module, "ClusterObserver", FakeObserver)
    with ExitStack() as stack:

        def serve(**settings: Any) -> TestClient:
            made = EndpointSettings("127.0.0.1:1", "127.0.0.1", 8000, **settings)
            for name, value in made.environment().items():
                monkeypatch.setenv(name, value)
            return stack.enter_context(TestClient(fake_vllm(), base_url=f"http://{ADDRESS}"))

        yield serve


def test_vllm_answers_its_own_paths(serve: Callable[..., TestClient]) -> None:
    client = serve()
    assert client.get("/v1/models").json() == {"data": []}
    assert client.get("/nothing").status_code == 404


def test_status_has_the_keys_of_the_frontends(serve: Callable[..., TestClient]) -> None:
    document = serve().get("/eaas/v1/status").json()
    assert document["endpoint"] == f"http://{ADDRESS}"
    assert set(document) == {"epoch", "members", "coverage", "endpoint", "tls"}
    assert [m["id"] for m in document["members"]] == ["client"]


def test_metrics_are_those_of_vllm_and_of_its_workers(serve: Callable[..., TestClient]) -> None:
    client = serve()
    assert client.get("/metrics").text == "vllm:generation_tokens_total 5.0\n"
    registry = CollectorRegistry()
    Counter("eaas_layer_calls", "Calls", registry=registry).inc(3)
    worker_page.serve_page(registry)
    page = client.get("/metrics").text
    assert page.startswith("vllm:generation_tokens_total 5.0\n")
    assert "eaas_layer_calls_total 3.0" in page


def test_foreign_hosts_and_origins_are_refused(serve: Callable[..., TestClient]) -> None:
    client = serve()
    for path in ("/eaas/v1/status", "/metrics", "/v1/models"):
        answer = client.get(path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/v1/realtime", headers={"Origin": "http://evil.example"}),
    ):
        pass


def test_every_path_needs_a_key(serve: Callable[..., TestClient], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    client = serve(api_key_file=str(keys))
    for path in ("/eaas/v1/status", "/v1/models", "/docs"):
        assert client.get(path).status_code == 401
    for path in ("/health", "/metrics"):
        assert client.get(path).status_code == 200
    allowed = {"Authorization": "Bearer secret"}
    assert client.get("/v1/models", headers=allowed).status_code == 200
    assert client.get("/eaas/v1/status", headers=allowed).status_code == 200
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass

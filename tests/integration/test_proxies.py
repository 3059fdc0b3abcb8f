"""A proxy or certificates that cannot be used in the environment, with a cluster on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from typer.testing import CliRunner

import attention_client
from balancer.autoscaler.meters import token_times
from eaas.cluster_snapshot.remote import remote_reader
from eaas.config import TelemetryConfig
from eaas.errors import ClusterError
from eaas.health import why_not_serving
from eaas.telemetry import start_tracing
from eaas.types import Member, MemberState, Role
from eaas_cli.bench.load import Load, Workload, run_load
from eaas_cli.commands import app
from eaas_cli.endpoint import fetch_status
from expert_server.weights.url_source import UrlSource

pytestmark = pytest.mark.integration

DEAD = "http://127.0.0.1:9"
METRICS = """# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_sum 2.0
vllm:inter_token_latency_seconds_count 4.0
"""
STATUS = json.dumps({"members": [], "state": "SERVING"})
CHUNK = {"choices": [{"text": "word"}], "usage": {"completion_tokens": 1}}


class Endpoint(BaseHTTPRequestHandler):
    """Answers as far as the callers read."""

    def do_GET(self) -> None:
        self._answer(METRICS if self.path == "/metrics" else STATUS)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stream = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"
        self._answer(stream if body["stream"] else json.dumps(CHUNK))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(
    params=[
        dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), DEAD),
        {"all_proxy": "socks5://127.0.0.1:9"},
        {"SSL_CERT_FILE": "/nowhere", "SSL_CERT_DIR": "/nowhere"},
    ],
    ids=["proxy", "socks", "certificates"],
    autouse=True,
)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
        if not name.startswith("SSL"):
            monkeypatch.setenv(name.upper(), value)


def _counters(url: str) -> object:
    with remote_reader("127.0.0.1:9", url) as reader:
        return reader.look().sources["endpoint"].why


def _token_times(url: str) -> object:
    member = Member(
        *("client", Role.ATTENTION_CLIENT, 1, "here"),
        address=url.removeprefix("http://"),
        state=MemberState.SERVING,
    )
    return token_times([member])["client", 0]


def _generate(*options: str) -> Callable[[str], object]:
    return lambda url: (
        CliRunner().invoke(app, ["generate", "a", "--endpoint", url, *options]).stdout
    )


CALLERS: dict[str, tuple[Callable[[str], Any], Any]] = {
    "status, scale, drain, rebalance, autoscale": (
        lambda url: fetch_status(url)["state"],
        "SERVING",
    ),
    "generate": (_generate(), "word\n"),
    "generate --json": (_generate("--json"), f"{json.dumps(CHUNK)}\n"),
    "top": (_counters, ""),
    "health": (lambda url: why_not_serving(f"{url}/health"), None),
    "bench": (lambda url: run_load(url, Workload(1, 1, 1, 1)).tokens, 1),
    "chaos": (lambda url: Load(url, [[1]], 1).result().answers[0].text, "word"),
    "autoscaler": (_token_times, (2.0, 4.0)),
    "weights": (lambda url: UrlSource(f"{url}/m").size("model.safetensors"), len(STATUS)),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_loopback_is_called_directly(endpoint: str, caller: str) -> None:
    ask, expected = CALLERS[caller]
    assert ask(endpoint) == expected


def test_load_finds_the_cluster(endpoint: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ClusterError, match="the cluster has no monitor"):
        attention_client.load(checkpoint(), endpoint)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that it is sent."""

    spans = 0

    def Export(self, request: Any, context: object) -> Any:
        self.spans += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_grpc_calls_are_direct() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer, collector = health.HealthServicer(), Collector()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert why_not_serving(f"127.0.0.1:{port}") is None
        config = TelemetryConfig(traces=True, sampling=1, endpoint=f"http://127.0.0.1:{port}")
        tracing = start_tracing(config, "client", "a")
        assert tracing is not None
        tracing.tracer.start_span("one").end()
        tracing.close()
        assert collector.spans == 1
    finally:
        server.stop(None).wait()

"""Health checks as containers run them: a process, its exit code and its output."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from eaas.health import main
from eaas.net.grpc_server import RunningServer, serve
from eaas.net.tls import Identity
from tls_world import certificates


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = serve([], "127.0.0.1", 0)
    yield running
    running.stop(0)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"reason": "2 experts"}'
            self.send_response(200 if self.path == "/good" else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: a test's output is its own."""

    http_server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http_server.server_port}"
    http_server.shutdown()
    thread.join()
    http_server.server_close()


def test_with_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a pod, which has its own certificate and no other."""
    made = certificates(tmp_path / "made")
    own = tmp_path / "own"
    own.mkdir()
    for name in ("ca.pem", "balancer.pem", "balancer.key"):
        (made / name).rename(own / name)
    running = serve([], "127.0.0.1", 0, credentials=Identity(own, "balancer").server_credentials())
    running.set_serving(True)
    try:
        monkeypatch.setenv("EAAS_SECURITY__TLS_DIR", str(own))
        assert main([running.address, "balancer"]) == 0
        assert main([running.address, "monitor"]) == 1
        assert "monitor.pem: No such file" in capsys.readouterr().out
        monkeypatch.delenv("EAAS_SECURITY__TLS_DIR")
        assert main([running.address]) == 1
        assert "UNAVAILABLE" in capsys.readouterr().out
    finally:
        running.stop(0)


def test_grpc(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([server.address]) == 1
    assert capsys.readouterr().out == f"{server.address}: NOT_SERVING\n"
    server.set_serving(True)
    assert main([server.address]) == 0
    assert capsys.readouterr().out == ""


def test_http(
    endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy that would answer nothing.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main([f"{endpoint}/good"]) == 0
    assert capsys.readouterr().out == ""
    assert main([f"{endpoint}/bad"]) == 1
    assert capsys.readouterr().out == f'{endpoint}/bad: 503 {{"reason": "2 experts"}}\n'


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "http://127.0.0.1:{}/health"])
def test_no_server(form: str, free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    address = form.format(free_port)
    assert main([address]) == 1
    assert "refused" in capsys.readouterr().out


def test_as_a_container_runs_it(server: RunningServer) -> None:
    """The check runs every few seconds, so it must import little."""
    server.set_serving(True)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eaas.health", server.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "eaas.net.grpc_client" in imported
    assert imported.isdisjoint({"torch", "numpy", "typer", "pydantic"})

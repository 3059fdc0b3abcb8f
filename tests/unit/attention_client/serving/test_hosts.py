"""Web pages cannot use an endpoint on loopback: DNS rebinding, and cross-site requests."""

from __future__ import annotations

from typing import Any

import pytest

from attention_client.main import _hosts
from attention_client.serving.access import LoopbackHosts
from eaas.config import AttentionClientConfig

LOCAL = (
    "localhost",
    "LocalHost",
    "localhost.",
    "chat.localhost",
    "127.0.0.1",
    "127.8.9.1",
    "[::1]",
    "box",
    "llm.example.com",
)
FOREIGN = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "10.0.0.7",
    "[::2]",
    "[fe80::1]",
    "0.0.0.0",
    "sub.llm.example.com",
    "2130706433",
)
STRANGE = ("localhost:80:80", "user@localhost", "localhost/x", "::1", "[::1", "localhost:evil", " ")

hosts = LoopbackHosts(["box", "LLM.example.com"])


def scope(method: str = "GET", **headers: str) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": "/v1/models", "headers": raw}


@pytest.mark.parametrize("port", ["", ":80", ":8080"])
@pytest.mark.parametrize("name", LOCAL)
def test_local_names_are_allowed(name: str, port: str) -> None:
    assert hosts.check(scope(host=name + port)) is None
    assert hosts.check(scope("POST", host="localhost", origin=f"http://{name}{port}")) is None


@pytest.mark.parametrize("port", ["", ":80", ":8080"])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_are_refused(name: str, port: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        refused = hosts.check(scope(method, host=name + port))
        assert refused is not None
        assert refused.status == 403
        assert name in refused.message
        assert "attention_client.allowed_hosts" in refused.message
    for scheme in ("http", "https"):
        refused = hosts.check(scope("POST", host="localhost", origin=f"{scheme}://{name}{port}"))
        assert refused is not None
        assert "Origin" in refused.message


@pytest.mark.parametrize("value", STRANGE)
def test_invalid_hosts_are_refused(value: str) -> None:
    assert hosts.check(scope(host=value)) is not None


@pytest.mark.parametrize("origin", ["null", "", "evil", "http://", "http://[", "//localhost"])
def test_invalid_origins_are_refused(origin: str) -> None:
    assert hosts.check(scope("DELETE", host="localhost", origin=origin)) is not None


def test_requests_without_a_page_are_allowed() -> None:
    assert hosts.check(scope("POST", host="localhost")) is None
    assert hosts.check(scope("POST")) is None
    extension = scope("POST", host="localhost", origin="chrome-extension://abcdef")
    assert hosts.check(extension) is None
    # The browser hides the answer from the page.
    assert hosts.check(scope(host="localhost", origin="https://evil.example")) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_an_endpoint_on_loopback_checks_hosts(host: str) -> None:
    config = AttentionClientConfig(host=host, allowed_hosts=["proxy.lan"])
    found = _hosts(config)
    assert found is not None
    assert found.check(scope(host=f"{host}:8000")) is None
    assert found.check(scope(host="proxy.lan")) is None
    assert found.check(scope(host="evil.example")) is not None


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_endpoint_for_other_machines_does_not_check_hosts(host: str) -> None:
    assert _hosts(AttentionClientConfig(host=host)) is None

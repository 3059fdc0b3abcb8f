"""Web pages cannot use an endpoint on loopback: DNS rebinding, and cross-site requests."""

from __future__ import annotations

from typing import Any

import pytest

from eaas.net.http_access import HttpAccess, known_hosts

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

access = HttpAccess(hosts=["box", "LLM.example.com"])


def scope(method: str = "GET", **headers: str) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": "/v1/models", "headers": raw}


@pytest.mark.parametrize("port", ["", ":80", ":8080"])
@pytest.mark.parametrize("name", LOCAL)
def test_local_names_are_allowed(name: str, port: str) -> None:
    assert access.wrong_host(scope(host=name + port)) is None
    assert access.wrong_host(scope("POST", host="localhost", origin=f"http://{name}{port}")) is None


@pytest.mark.parametrize("port", ["", ":80", ":8080"])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_are_refused(name: str, port: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        refused = access.wrong_host(scope(method, host=name + port))
        assert refused is not None
        assert refused.status == 403
        assert name in refused.message
        assert "frontend.allowed_hosts" in refused.message
    for scheme in ("http", "https"):
        refused = access.wrong_host(
            scope("POST", host="localhost", origin=f"{scheme}://{name}{port}")
        )
        assert refused is not None
        assert "Origin" in refused.message


@pytest.mark.parametrize("value", STRANGE)
def test_invalid_hosts_are_refused(value: str) -> None:
    assert access.wrong_host(scope(host=value)) is not None


@pytest.mark.parametrize("origin", ["null", "", "evil", "http://", "http://[", "//localhost"])
def test_invalid_origins_are_refused(origin: str) -> None:
    assert access.wrong_host(scope("DELETE", host="localhost", origin=origin)) is not None


def test_requests_without_a_page_are_allowed() -> None:
    assert access.wrong_host(scope("POST", host="localhost")) is None
    assert access.wrong_host(scope("POST")) is None
    extension = scope("POST", host="localhost", origin="chrome-extension://abcdef")
    assert access.wrong_host(extension) is None
    # The browser hides the answer from the page.
    assert access.wrong_host(scope(host="localhost", origin="https://evil.example")) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_an_endpoint_on_loopback_checks_hosts(host: str) -> None:
    found = HttpAccess(hosts=known_hosts(host, ["proxy.lan"]))
    assert found.wrong_host(scope(host=f"{host}:8000")) is None
    assert found.wrong_host(scope(host="proxy.lan")) is None
    assert found.wrong_host(scope(host="evil.example")) is not None


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_endpoint_for_other_machines_does_not_check_hosts(host: str) -> None:
    assert known_hosts(host, []) is None

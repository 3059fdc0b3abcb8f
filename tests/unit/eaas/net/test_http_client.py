"""Which proxies and certificates of the environment count for a URL; one-line errors; lines of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eaas.errors import ConfigError
from eaas.net.http_client import failure, http_settings
from eaas.net.loopback import is_loopback
from range_server import RangeServer

# A documentation address (RFC 5737): nobody answers there, only the proxy does.
ELSEWHERE = "http://192.0.2.1:8000/models/m/file"
DEAD = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proxies and certificates of the environment that runs the tests."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "file").write_text("here")
    with RangeServer(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1/x", True),
        ("http://127.8.9.1", True),
        ("https://[::1]:1", True),
        ("http://LocalHost:80", True),
        ("http://a.localhost", True),
        ("http://user@127.0.0.1", True),
        ("http://0.0.0.0:1", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example", False),
        ("127.0.0.1:1", False),
        ("http://[::1", False),
        ("", False),
    ],
)
def test_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", [DEAD, "socks5://127.0.0.1:9", "nothing://"])
def test_loopback_goes_to_no_proxy(
    monkeypatch: pytest.MonkeyPatch, server: RangeServer, name: str, proxy: str
) -> None:
    monkeypatch.setenv(name, proxy)
    with httpx.Client(**http_settings(server.url)) as http:
        assert http.get(f"{server.url}/file").text == "here"

    async def ask() -> str:
        async with httpx.AsyncClient(**http_settings(server.url)) as client:
            return (await client.get(f"{server.url}/file")).text

    assert asyncio.run(ask()) == "here"


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_other_hosts_go_to_the_proxy(
    monkeypatch: pytest.MonkeyPatch, server: RangeServer, name: str
) -> None:
    monkeypatch.setenv(name, server.url.removeprefix("http://").partition("/")[0])
    with httpx.Client(**http_settings(ELSEWHERE)) as http:
        assert http.get(ELSEWHERE).is_success
    assert server.targets == [ELSEWHERE]


def test_no_proxy_excepts_a_host_also_from_an_unusable_proxy(
    monkeypatch: pytest.MonkeyPatch, server: RangeServer
) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"^all_proxy: this proxy cannot be used \(.*socks.*no_proxy$"
    ):
        httpx.Client(**http_settings(ELSEWHERE))
    monkeypatch.setenv("no_proxy", "other, 192.0.2.1")
    with (
        httpx.Client(**http_settings(ELSEWHERE), timeout=0.01) as http,
        pytest.raises(httpx.TransportError),
    ):
        http.get(ELSEWHERE)


def test_a_missing_file_of_certificates(
    monkeypatch: pytest.MonkeyPatch, server: RangeServer
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    message = r"^SSL_CERT_FILE=/nowhere/ca\.pem: No such file or directory: correct or unset it$"
    for url in ("https://192.0.2.1", "https://localhost"):
        with pytest.raises(ConfigError, match=message):
            httpx.Client(**http_settings(url))
    httpx.Client(**http_settings(ELSEWHERE)).close()


def test_a_failure_is_one_line_without_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    response = httpx.Response(502, request=httpx.Request("GET", ELSEWHERE))
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert failure(ELSEWHERE, caught.value) == "502 Bad Gateway"
    assert failure(ELSEWHERE, httpx.ReadTimeout("")) == "ReadTimeout"
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    assert failure(ELSEWHERE, OSError("lost\nmore")) == "lost, through the proxy of http_proxy"
    assert failure("http://127.0.0.1", OSError("lost")) == "lost"
    assert failure("http://[::1", OSError("lost")) == "lost"

"""Web pages of other origins and names: those that the endpoint allows, and those that reach nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eaas.net.api_keys import ApiKeys
from http_box import Box, error_of

pytestmark = pytest.mark.integration

PAGE, OTHER = "https://app.example", "https://evil.example"
KEY = "k" * 32


@pytest.fixture(scope="module")
def open_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """An endpoint with a key, for one origin."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    with Box(origins=[PAGE], keys=ApiKeys(file)) as box:
        yield box


@pytest.fixture(scope="module")
def own_machine_box() -> Iterator[Box]:
    """An endpoint on loopback that allows any origin, of which one has an allowed host."""
    with Box(origins=["*"], hosts=["app.example"]) as box:
        yield box


def preflight(box: Box, origin: str, path: str = "/v1/chat/completions", **headers: str) -> Any:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return box.http.options(path, headers=asked | headers)


def cors_headers(response: httpx.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {name: text for name, text in response.headers.items() if name.startswith(prefix)}


def test_a_page_of_an_allowed_origin(open_box: Box) -> None:
    allowed = preflight(open_box, PAGE)
    assert allowed.status_code == 200
    headers = cors_headers(allowed)
    assert headers["access-control-allow-origin"] == PAGE
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in headers
    body = {"prompt": "Hello", "max_tokens": 2, "odd": 1}
    shown = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    answer = open_box.http.post("/v1/completions", json=body, headers=shown)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Eaas-Ignored-Fields" in answer.headers["access-control-expose-headers"]
    # The page can read why it was refused.
    refused = open_box.http.post("/v1/completions", json=body, headers={"Origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE


def test_other_pages_get_no_headers(open_box: Box) -> None:
    assert preflight(open_box, OTHER).status_code == 400
    shown = {"Origin": OTHER, "Authorization": f"Bearer {KEY}"}
    answer = open_box.http.get("/v1/models", headers=shown)
    assert "access-control-allow-origin" not in answer.headers


def test_loopback_checks_hosts_and_origins_first(own_machine_box: Box) -> None:
    box, before = own_machine_box, own_machine_box.forwards
    body = {"prompt": "Hello", "max_tokens": 2}
    for origin in (OTHER, "null"):
        assert not cors_headers(preflight(box, origin))
        assert not cors_headers(box.http.get("/v1/models", headers={"Origin": origin}))
        refused = box.http.post("/v1/completions", json=body, headers={"Origin": origin})
        assert refused.status_code == 403
        assert not cors_headers(refused)
    rebound = preflight(box, PAGE, Host="evil.example")
    assert rebound.status_code == 403
    assert not cors_headers(rebound)
    assert box.forwards == before
    for origin in (PAGE, "http://localhost:3000"):
        assert preflight(box, origin).status_code == 200
        answer = box.http.post("/v1/completions", json=body, headers={"Origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"


def test_the_dashboard_stays_closed(own_machine_box: Box) -> None:
    assert not cors_headers(own_machine_box.http.get("/", headers={"Origin": PAGE}))


@pytest.fixture(scope="module")
def closed_box() -> Iterator[Box]:
    """An endpoint on loopback that allows no origin."""
    with Box(hosts=["proxy.lan"]) as box:
        yield box


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/live"),
        ("GET", "/metrics"),
        ("GET", "/eaas/v1/status"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("POST", "/eaas/v1/actions"),
        ("OPTIONS", "/v1/models"),
    ],
)
def test_a_rebound_name_reaches_nothing(closed_box: Box, method: str, path: str) -> None:
    before = closed_box.forwards
    refused = closed_box.http.request(
        method, path, headers={"Host": "evil.example:8000"}, json={"prompt": "Hello"}
    )
    assert refused.status_code == 403
    assert "allowed_hosts" in error_of(refused)["message"]
    assert closed_box.forwards == before


def test_a_page_of_another_site_generates_nothing(closed_box: Box) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("http://proxy.lan", 200),
    ):
        answer = closed_box.http.post("/v1/completions", json=body, headers={"Origin": origin})
        assert answer.status_code == status
        # Without CORS headers no page of another origin can read the answer.
        assert not [name for name in answer.headers if name.startswith("access-control-")]

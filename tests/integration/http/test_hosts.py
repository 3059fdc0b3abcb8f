"""An endpoint on loopback, and requests of web pages in a local browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from http_box import Box, error_of

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def own_machine_box() -> Iterator[Box]:
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
def test_a_rebound_name_reaches_nothing(own_machine_box: Box, method: str, path: str) -> None:
    before = own_machine_box.forwards
    refused = own_machine_box.http.request(
        method, path, headers={"Host": "evil.example:8000"}, json={"prompt": "Hello"}
    )
    assert refused.status_code == 403
    assert "allowed_hosts" in error_of(refused)["message"]
    assert own_machine_box.forwards == before


def test_a_page_of_another_site_generates_nothing(own_machine_box: Box) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("http://proxy.lan", 200),
    ):
        answer = own_machine_box.http.post("/v1/completions", json=body, headers={"Origin": origin})
        assert answer.status_code == status
        # Without CORS headers no page of another origin can read the answer.
        assert not [name for name in answer.headers if name.startswith("access-control-")]

"""Requests of other sites, and the Content-Security-Policy."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from attention_client.serving.dashboard.policy import is_foreign, with_nonce

SOCKET = "/_nicegui_ws/socket.io/"
HERE, EVIL = "127.0.0.1:8000", "http://evil.example"


@pytest.mark.parametrize(
    ("path", "site", "dest", "foreign"),
    [
        ("/", "none", "document", False),
        ("/", "same-origin", "document", False),
        ("/", "cross-site", "document", False),  # a link leads here
        ("/", "cross-site", "iframe", True),
        ("/", "cross-site", "image", True),
        ("/", "same-site", "empty", True),  # another port of this machine
        (SOCKET, "same-origin", "empty", False),
        (SOCKET, "cross-site", "empty", True),
        (SOCKET, "cross-site", "document", True),
        (SOCKET, "same-site", "empty", True),
        ("/_nicegui/x.js", "cross-site", "script", True),
    ],
)
def test_pages_of_other_sites_can_only_link_here(
    path: str, site: str, dest: str, foreign: bool
) -> None:
    asked = Headers({"host": HERE, "sec-fetch-site": site, "sec-fetch-dest": dest})
    assert is_foreign(path, asked) is foreign


@pytest.mark.parametrize(
    ("origin", "foreign"),
    [
        (None, False),  # curl
        (f"http://{HERE}", False),
        (f"https://{HERE}", False),  # a proxy speaks TLS
        (EVIL, True),
        ("http://127.0.0.1:8001", True),
        ("null", True),
        ("", True),
    ],
)
def test_older_browsers_send_the_origin(origin: str | None, foreign: bool) -> None:
    asked = {"host": HERE} | ({} if origin is None else {"origin": origin})
    assert is_foreign(SOCKET, Headers(asked)) is foreign


def test_only_scripts_and_style_sheets_get_the_nonce() -> None:
    html = b'<style>a</style><script src="x"></script><scripty><SCRIPT>&lt;script>'
    marked = (
        b'<style nonce="n">a</style><script nonce="n" src="x"></script><scripty><SCRIPT>&lt;script>'
    )
    assert with_nonce(html, "n") == marked

"""Requests of other sites; the operator's token and cookie."""

from __future__ import annotations

from http.cookies import SimpleCookie

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser

from frontend.dashboard.viewers import (
    ACTIONS_PATH,
    SNAPSHOT_PATH,
    OperatorToken,
    is_foreign,
    is_local,
    token_of,
)

TOKEN = token_of("secret")
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
        (ACTIONS_PATH, "same-origin", "empty", False),
        (ACTIONS_PATH, "cross-site", "empty", True),
        (ACTIONS_PATH, "cross-site", "document", True),
        (ACTIONS_PATH, "same-site", "empty", True),
        ("/page/page.js", "cross-site", "script", True),
        (SNAPSHOT_PATH, "cross-site", "document", True),
        ("/operator/x/", "cross-site", "document", False),  # a link in a chat or a mail
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
    assert is_foreign(ACTIONS_PATH, Headers(asked)) is foreign


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("192.168.0.7", True),
        ("localhost.evil.example", False),
        ("127.0.0.1.nip.io", False),
        ("", False),
        (None, False),
    ],
)
def test_buttons_are_for_addresses_and_localhost(host: str | None, local: bool) -> None:
    assert is_local(host) is local


def test_the_token_becomes_a_cookie_of_this_endpoint() -> None:
    answer = OperatorToken(TOKEN, 8000).login(TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    shown = cookie_parser(f"other=1; {cookie.key}={cookie.value}")
    assert OperatorToken(TOKEN, 8000).is_operator(shown)
    assert not OperatorToken(TOKEN, 8001).is_operator(shown)
    assert not OperatorToken(token_of("another secret"), 8000).is_operator(shown)


@pytest.mark.parametrize("shown", ["", "x", TOKEN[:-1], TOKEN + "x", f"{TOKEN}/x", "\udce4"])
def test_wrong_tokens_are_refused(shown: str) -> None:
    with pytest.raises(HTTPException, match="403: This token does not belong to the cluster"):
        OperatorToken(TOKEN, 8000).login(shown)


@pytest.mark.parametrize("cookie", ["", "eaas-operator-8000=", "eaas-operator-8000=x", "=;;\x01"])
def test_other_cookies_are_no_operators(cookie: str) -> None:
    assert not OperatorToken(TOKEN, 8000).is_operator(cookie_parser(cookie))


def test_the_token_does_not_reveal_the_secret() -> None:
    assert TOKEN == token_of("secret") != token_of("secret2")
    assert "secret" not in TOKEN

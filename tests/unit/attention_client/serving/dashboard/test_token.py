"""The operator's token and cookie."""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Any

import pytest
from starlette.datastructures import Headers

from attention_client.serving.dashboard.token import OperatorToken, token_of

TOKEN = token_of("secret")


def ask(path: str) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": path, "headers": []}


def test_the_token_becomes_a_cookie_of_this_endpoint() -> None:
    answer = OperatorToken(TOKEN, 8000).login(ask(f"/operator/{TOKEN}/"))
    assert answer is not None
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    shown = Headers({"cookie": f"other=1; {cookie.key}={cookie.value}"})
    assert OperatorToken(TOKEN, 8000).is_operator(shown)
    assert not OperatorToken(TOKEN, 8001).is_operator(shown)
    assert not OperatorToken(token_of("another secret"), 8000).is_operator(shown)


@pytest.mark.parametrize("shown", ["", "x", TOKEN[:-1], TOKEN + "x", f"{TOKEN}/x", "\udce4"])
def test_wrong_tokens_are_refused(shown: str) -> None:
    token = OperatorToken(TOKEN, 8000)
    answer = token.login(ask(f"/operator/{shown}"))
    assert answer is not None
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("cookie", ["", "eaas-operator-8000=", "eaas-operator-8000=x", "=;;\x01"])
def test_other_requests_do_not_log_in(cookie: str) -> None:
    token = OperatorToken(TOKEN, 8000)
    assert token.login(ask("/")) is None
    assert token.login(ask("/_nicegui/x")) is None
    assert not token.is_operator(Headers({"cookie": cookie}))


def test_the_token_does_not_reveal_the_secret() -> None:
    assert TOKEN == token_of("secret") != token_of("secret2")
    assert "secret" not in TOKEN

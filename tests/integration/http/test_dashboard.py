"""The dashboard in a real browser, over clusters that are not there: every state of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import Watched, open_page
from eaas.local.nursery import Nursery
from theatre import Theatre

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KEY = "sk-of-the-dashboard-0123456789"


def test_members_in_every_state(scene: Callable[..., Watched]) -> None:
    watched = scene("states")
    watched.wait_text("members", "DRAINING")
    rows = watched.part("members").locator("tbody tr")
    states = {
        rows.nth(i).locator("th").inner_text(): rows.nth(i).locator(".state").inner_text()
        for i in range(rows.count())
    }
    assert [states[f"expert-server-{i}"] for i in range(5)] == [
        "SERVING",
        "JOINING",
        "DRAINING",
        "SUSPECT",
        "DEAD",
    ]
    assert "1 of 5 serving" in watched.part("summary").inner_text()
    # Those that live can be killed.
    kills = watched.page.get_by_role("button", name=re.compile("^Kill "))
    assert [kills.nth(i).is_enabled() for i in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("source", ["monitor", "balancer", "endpoint"])
def test_who_is_silent_is_told_to_everybody(scene: Callable[..., Watched], source: str) -> None:
    watched = scene(source)
    watched.wait_text("alerts", f"{source} unreachable since 12 s (connection refused)")
    assert watched.page.get_by_role("alert").filter(has_text=source).count() == 1
    # What it said last is still there.
    watched.wait_text("members", "expert-server-2")


def test_uncovered_experts(scene: Callable[..., Watched]) -> None:
    watched = scene("uncovered")
    # Servers 1 and 2 are dead; expert e is on servers e and e + 1, modulo 3.
    watched.wait_text(
        "alerts", "5 experts uncovered: no live replica of layer/expert 0/1, 0/4, 0/7, 0/10, 0/13"
    )
    watched.wait_text("alerts", "expert-server-1, expert-server-2 are DEAD.")
    watched.wait_text("placement", "5 with 0 live replicas, 11 with 1 live replica.")
    assert "5 uncovered" in watched.part("summary").inner_text()


def test_an_empty_cluster(scene: Callable[..., Watched]) -> None:
    watched = scene("empty")
    watched.wait_text("members", "No members are known yet")
    watched.wait_text("placement", "There is no placement yet")
    assert watched.part("alerts").inner_text() == ""


def test_a_layer_is_chosen_and_its_placement_shown(scene: Callable[..., Watched]) -> None:
    watched = scene("small")
    watched.wait_text("placement", "experts 0 to 15")
    watched.page.get_by_label("MoE layer").click()
    watched.page.get_by_role("option", name="3", exact=True).click()
    watched.page.locator('[data-part="placement"] img[alt^="Layer 3:"]').wait_for()
    # Servers by layers, experts by servers. A picture is decoded after its text is there.
    watched.page.wait_for_function(
        """() => JSON.stringify([...document.querySelectorAll("img.map")].map(
            i => [i.naturalWidth, i.naturalHeight])) === "[[3,4],[16,3]]" """
    )


def test_a_chat_streams_and_can_be_ended(scene: Callable[..., Watched]) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    message = watched.page.get_by_label("Message")
    message.fill("Hello")
    message.press("Enter")
    answer = watched.part("answer")
    watched.page.wait_for_function(
        "() => document.querySelector('[data-part=answer]').innerText.length > 5"
    )
    watched.page.get_by_role("button", name="Send").click()  # waits until the answer is over
    watched.page.get_by_role("button", name="Cancel", exact=True).click()
    assert "broke off" not in answer.inner_text()


def test_everything_comes_from_the_endpoint_and_nothing_complains(
    scene: Callable[..., Watched], theatre: Theatre
) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    assert watched.hosts == {httpx.URL(theatre.url).netloc.decode()}
    assert watched.complaints == []
    headers = httpx.get(theatre.url, timeout=60).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy
    assert headers["cache-control"] == "no-store"


def test_other_paths_are_still_the_endpoints(theatre: Theatre) -> None:
    for path in ("/nothing", "/v1/nothing", "/_niceguix", "/nicegui"):
        answer = httpx.get(f"{theatre.url}{path}", timeout=60)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "No such URL."
    assert httpx.get(f"{theatre.url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"


def test_it_is_usable_by_keyboard_and_screen_reader(scene: Callable[..., Watched]) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    page = watched.page
    names = [
        page.get_by_role("button", name="Start an expert server"),
        page.get_by_role("button", name="Kill expert-server-1"),
        page.get_by_role("button", name="Pause expert-server-1"),
        page.get_by_role("table", name="Members"),
        page.get_by_role("columnheader", name="Lease age"),
        page.get_by_role("rowheader", name="expert-server-1").first,
        page.get_by_role("log", name="Answer"),
        page.get_by_role("region", name="Load: layers by servers"),
        page.get_by_role("img", name=re.compile("^Heatmap of 4 MoE layers by 3 expert servers")),
        page.get_by_role("heading", name="Chat", level=2),
    ]
    for found in names:
        found.wait_for(state="attached")
    first = page.locator("a, button, input, summary, [tabindex='0']").first
    assert first.inner_text() == "Skip to the chat"
    first.focus()
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"
            )
        )
    assert {"Send", "Rebalance now", "Kill expert-server-2", "Members", "Time line"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, img')]"
        ".filter(e => e.offsetParent && !(e.ariaLabel || e.alt || e.labels?.length || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_a_key_is_asked_for_as_a_password_and_gives_no_buttons(
    browser: Any, cleanup: ExitStack, tmp_path: Path, nursery: Nursery
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    theatre = Theatre(nursery, file)
    cleanup.callback(theatre.close)
    for path in ("/", "/favicon.ico", "/_nicegui_ws/socket.io/", "/_nicegui/x"):
        refused = httpx.get(f"{theatre.url}{path}", timeout=60)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
    for wrong in (("me", "no"), (KEY, "")):
        assert httpx.get(theatre.url, auth=wrong, timeout=60).status_code == 401
    # The password opens the page and nothing else.
    assert httpx.get(f"{theatre.url}/v1/models", auth=("me", KEY), timeout=60).status_code == 401
    credentials = {"username": "me", "password": KEY}
    with open_page(browser, theatre.url, http_credentials=credentials) as watched:
        watched.wait_text("members", "SERVING")
        assert watched.page.get_by_role("button", name=re.compile("Kill|Scale")).count() == 0
        assert watched.page.get_by_role("button", name="Send").count() == 1


def test_another_hosts_name_gives_no_buttons(browser: Any, theatre: Theatre) -> None:
    """A page of theirs could press them, if its name led here."""
    theatre.show("small")
    port = httpx.URL(theatre.url).port
    answers = {
        host: "Kill expert" in httpx.get(theatre.url, headers={"host": host}, timeout=60).text
        or "Start an expert server"
        in httpx.get(theatre.url, headers={"host": host}, timeout=60).text
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"evil.example:{port}")
    }
    assert list(answers.values()) == [True, True, False]

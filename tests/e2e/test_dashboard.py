"""The dashboard of `eaas up` in a real browser: buttons work, and a chat continues."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from browser import PATIENCE_MS, Watched, chromium, open_page

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

# Longer than a double click.
A_WHILE_MS = 600
LENGTH = "document.querySelector('#answer').innerText.length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


# A story in one cluster: each chapter leaves it as the next one needs it.
@pytest.fixture(scope="module")
def up(browser: Any, checkpoint: Callable[..., Path], start_up: Callable[..., Any]) -> Any:
    running = start_up(checkpoint("qwen3_moe"), "--clients", "2")
    running.wait_serving()
    return running


@pytest.fixture
def watched(browser: Any, up: Any) -> Iterator[Watched]:
    url = up.wait_output(r"page: +(http://\S+/)")
    with open_page(browser, url) as page:
        page.part("members").locator("tr", has_text="expert-server-2").wait_for()
        yield page


def wait_state(watched: Watched, name: str, state: str) -> None:
    row = watched.part("members").locator("tr", has_text=name)
    row.locator(".state", has_text=re.compile(f"^{state}$")).wait_for()


def press(watched: Watched, name: str) -> None:
    watched.page.get_by_role("button", name=name, exact=True).click()


def confirm(watched: Watched, name: str) -> None:
    """Press a button and confirm. A double click only asks."""
    watched.page.get_by_role("button", name=name, exact=True).dblclick()
    confirmed = watched.page.get_by_role("dialog", name=f"{name}?").get_by_role("button", name=name)
    confirmed.wait_for()
    watched.page.wait_for_timeout(A_WHILE_MS)
    confirmed.click()


def test_the_chat_continues_when_a_button_kills_a_server(watched: Watched) -> None:
    page = watched.page
    page.get_by_label("Max tokens").fill("1500")
    page.get_by_label("Message").fill("Once upon a time")
    press(watched, "Send")
    page.wait_for_function(f"() => {LENGTH} > 50")
    assert "expert-server-1" in watched.part("answer-servers").inner_text()
    confirm(watched, "Kill expert-server-1")
    shown = page.evaluate(LENGTH)
    wait_state(watched, "expert-server-1", "DEAD")
    watched.wait_text("alerts", "expert-server-1 is DEAD.")
    watched.wait_text("alerts", "No expert is uncovered: requests continue.")
    assert watched.part("alerts").get_by_text("unless it returns within").count() == 1
    page.wait_for_function(f"() => {LENGTH} > {shown + 50}")
    # A dead server computes nothing more.
    last = page.locator("#answer [data-servers]").last.get_attribute("data-servers")
    assert last
    assert "expert-server-1" not in last
    assert "The answer failed" not in watched.part("answer").inner_text()
    watched.wait_text("events", "expert-server-1 is DEAD")
    watched.wait_text("operate-status", "expert-server-1 (pid")
    watched.wait_text("operate-status", "was killed")
    assert "2 of 3 serving" in watched.part("summary").inner_text(), "one, and no other"
    assert "≥ 1, on 1 node" in watched.part("summary").inner_text()
    watched.wait_text("placement", "with 1 live replica")

    press(watched, "Start an expert server")
    wait_state(watched, "expert-server-1", "SERVING")
    watched.wait_text("events", "expert-server-1 joined (life 2")
    press(watched, "Rebalance now")
    watched.part("operate-status").filter(has_text=re.compile("PAR [0-9.]+ to [0-9.]+")).wait_for()
    watched.wait_text("decisions", "manual")


def test_the_chat_continues_when_buttons_kill_both_attention_clients(watched: Watched) -> None:
    page = watched.page
    page.get_by_label("Max tokens").fill("1500")
    page.get_by_label("Message").fill("Once upon a time")
    press(watched, "Send")
    page.wait_for_function(f"() => {LENGTH} > 50")
    for name in ("attention-client-0", "attention-client-1"):
        confirm(watched, f"Kill {name}")
        watched.wait_text("operate-status", f"{name} (pid")
    watched.wait_text("events", "1 request moves to another attention client (lost)")
    shown = page.evaluate(LENGTH)
    # The launcher starts them again.
    for name in ("attention-client-0", "attention-client-1"):
        watched.wait_text("events", f"{name} joined (life 2")
        wait_state(watched, name, "SERVING")
    page.wait_for_function(f"() => {LENGTH} > {shown + 50}")
    assert "The answer failed" not in watched.part("answer").inner_text()
    watched.wait_text("curves", "moved to another attention client")
    press(watched, "Cancel")


def test_a_paused_server_is_shown_and_resumes(watched: Watched) -> None:
    confirm(watched, "Pause expert-server-0")
    # It is SUSPECT for less than a second, which a look may miss, and then DEAD.
    late = re.compile("expert-server-0 is (SUSPECT|DEAD)")
    watched.part("events").filter(has_text=late).wait_for()
    press(watched, "Resume expert-server-0")
    wait_state(watched, "expert-server-0", "SERVING")


def test_scaled_by_the_button(up: Any, watched: Watched) -> None:
    servers = watched.page.get_by_label("Servers", exact=True)
    # As many as there are: who presses the button without a thought changes nothing.
    expect(servers).to_have_value("3", timeout=PATIENCE_MS)
    servers.fill("5")
    press(watched, "Scale to that number of servers")
    watched.wait_text("operate-status", "Scaling to 5 expert servers")
    for name in ("expert-server-3", "expert-server-4"):
        wait_state(watched, name, "SERVING")
    assert up.member("expert-server-4")["state"] == "SERVING"


def test_the_chat_answers_without_balancer_and_monitor(up: Any, watched: Watched) -> None:
    for name in ("balancer", "monitor"):
        os.kill(up.member(name)["pid"], signal.SIGKILL)
        watched.wait_text("alerts", f"{name} unreachable since")
    watched.part("members").locator("tr", has_text="expert-server-2").wait_for()
    watched.page.get_by_label("Max tokens").fill("20")
    press(watched, "Send")
    watched.page.wait_for_function(f"() => {LENGTH} > 5", timeout=PATIENCE_MS)
    assert "The answer failed" not in watched.part("answer").inner_text()

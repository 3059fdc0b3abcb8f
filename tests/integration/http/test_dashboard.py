"""The dashboard in a real browser, over simulated clusters."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from browser import CONTRASTS, NARROW, PATIENCE_MS, WIDE, Watched
from dashboard_process import cluster
from ui_fixture import UiFixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

# Longer than a double click, shorter than a button waits for its confirmation.
A_WHILE_MS = 600

Scene = Callable[..., Watched]


def button(watched: Watched, name: str) -> Any:
    return watched.page.get_by_role("button", name=name, exact=True)


def ask(watched: Watched, name: str) -> Any:
    """Press a button that asks for a confirmation; return its dialog."""
    button(watched, name).click()
    dialog = watched.page.get_by_role("dialog", name=f"{name}?")
    dialog.wait_for()
    # The second press of a double click confirms nothing.
    watched.page.wait_for_timeout(A_WHILE_MS)
    return dialog


def confirm(watched: Watched, name: str) -> None:
    """Press a button, and confirm."""
    ask(watched, name).get_by_role("button", name=name).click()


def status(watched: Watched) -> str:
    return str(watched.part("operate-status").inner_text())


def test_keyboard_and_screen_reader(scene: Scene) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    page = watched.page
    for found in (
        page.get_by_role("button", name="Start an expert server"),
        page.get_by_role("button", name="Kill expert-server-1"),
        page.get_by_role("button", name="Pause expert-server-1"),
        page.get_by_role("table", name="Members"),
        page.get_by_role("columnheader", name="Lease age"),
        page.get_by_role("rowheader", name="expert-server-1").first,
        page.get_by_role("log", name="Answer"),
        page.get_by_role("region", name="Load: layers by servers"),
        page.get_by_role("img", name=re.compile("^Heatmap of 4 MoE layers by 3 expert servers")),
    ):
        found.wait_for(state="attached")
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(e => +e.tagName[1])"
    )
    assert levels == [1] + [2] * 8
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, img')]"
        ".filter(e => e.offsetParent && !(e.ariaLabel || e.alt || e.labels?.length || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
    # The accessible name contains the visible text (WCAG 2.5.3).
    pairs = page.get_by_role("button").evaluate_all(
        "all => all.filter(e => e.ariaLabel).map(e => [e.ariaLabel, [...e.children].map(c => c.textContent)])"
    )
    assert all(" ".join(filter(None, seen)) in label for label, seen in pairs)
    first = page.locator("a, button, input, summary, [tabindex='0']").first
    assert first.inner_text() == "Skip to the chat"
    first.focus()
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        name, html, is_visible = page.evaluate(
            """() => {
                const e = document.activeElement;
                const style = getComputedStyle(e);
                const outline = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                return [e.ariaLabel || e.textContent.trim(), e.outerHTML.slice(0, 90), outline];
            }"""
        )
        reached.add(name)
        assert is_visible, f"no visible focus: {html}"
    assert {"Send", "Rebalance now", "Kill expert-server-2", "Members", "Time line"} <= reached


def test_buttons_follow_the_state_of_their_server(scene: Scene) -> None:
    watched = scene("states")
    watched.wait_text("members", "DRAINING")
    assert "1 of 5 serving" in watched.part("summary").inner_text()
    kills = watched.page.get_by_role("button", name=re.compile("^Kill "))
    assert [kills.nth(i).is_enabled() for i in range(5)] == [True] * 4 + [False]
    for _ in range(2):
        kills.nth(4).dispatch_event("click")
        watched.page.wait_for_timeout(A_WHILE_MS)
    assert status(watched) == ""
    assert watched.page.get_by_role("dialog").count() == 0


def test_engines_are_listed_with_buttons_and_what_they_lost(scene: Scene) -> None:
    watched = scene("engines")
    watched.wait_text("members", "frontend")
    watched.wait_text("alerts", "attention-client-1 is DEAD.")
    watched.wait_text("alerts", "Requests continue on another attention client.")
    assert "Attention clients 1 of 2 serving" in texts(watched, "summary")
    assert "2 running, 0 waiting, 3 moved to another attention client. " in texts(watched, "curves")
    named = [f"attention-client-{i}" for i in range(2)]
    kills = [button(watched, f"Kill {name}") for name in named]
    assert [kill.is_enabled() for kill in kills] == [True, False]
    assert button(watched, "Kill frontend").count() == 0
    confirm(watched, "Kill attention-client-0")
    watched.wait_text("operate-status", "attention-client-0 runs on elsewhere")


def test_the_banner_is_always_in_sight(scene: Scene) -> None:
    watched = scene("killed")
    page = watched.page
    page.set_viewport_size(NARROW)
    banner = watched.page.get_by_role("alert").filter(has_text="expert-server-1 is DEAD.")
    for y in (0, 500, 10_000):
        page.evaluate("y => document.querySelector('.page').scrollTo(0, y)", y)
        expect(banner).to_be_in_viewport()
    # It covers neither the end of the page nor anything else.
    last, end, top = page.evaluate(
        """() => [document.querySelector("#decisions"), document.querySelector(".page")].map(
            e => e.getBoundingClientRect().bottom).concat(
            document.querySelector(".banner").getBoundingClientRect().top)"""
    )
    assert last <= end <= top


def test_a_laptop_shows_state_loss_next_step_and_chat_without_scrolling(scene: Scene) -> None:
    watched = scene("killed", viewport={"width": 1366, "height": 768})
    page = watched.page
    seen = [
        page.get_by_text("1 alert", exact=True),
        page.get_by_text("2 of 3 serving"),
        page.get_by_text("expert-server-1 is DEAD."),
        page.get_by_text("No expert is uncovered: requests continue."),
        page.get_by_text(re.compile("^Next: ")),
        page.get_by_text("eaas scale 3"),
        page.get_by_label("Message"),
        page.get_by_role("log", name="Answer"),
        button(watched, "Start an expert server"),
        *(button(watched, f"Kill expert-server-{i}") for i in range(3)),
    ]
    for each in seen:
        expect(each).to_be_in_viewport(ratio=1, timeout=PATIENCE_MS)
    scene("small")
    page.get_by_text("all is well").wait_for()


def test_an_endpoint_that_is_gone_and_returns(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    watched.wait_text("members", "SERVING")
    scene("monitor")
    watched.wait_text("alerts", "monitor unreachable")
    button(watched, "Dismiss the alerts").click()
    watched.page.route("**/eaas/v1/*", lambda route: route.abort())
    watched.wait_text("alerts", "The endpoint has not answered since")
    assert watched.part("members").get_by_text("SERVING").count() == 5, "the last data is shown"
    button(watched, "Rebalance now").click()
    watched.wait_text("operate-status", "the endpoint does not answer")
    watched.page.unroute("**/eaas/v1/*")
    # The alert that was dismissed stays so.
    expect(watched.page.locator(".banner")).to_be_hidden(timeout=PATIENCE_MS)


def test_a_dismissed_alert_returns_only_with_news(scene: Scene) -> None:
    watched = scene("killed")
    watched.wait_text("alerts", "expert-server-1 is DEAD.")
    button(watched, "Dismiss the alerts").click()
    banner = watched.page.locator(".banner")
    expect(banner).to_be_hidden(timeout=PATIENCE_MS)
    scene("killed")
    expect(banner).to_be_hidden()
    # Another alert, and then the first one again after it had ended.
    scene("monitor")
    watched.wait_text("alerts", "monitor unreachable since")
    scene("killed")
    watched.wait_text("alerts", "expert-server-1 is DEAD.")


def test_the_answer_stays_at_its_end_unless_the_reader_scrolls_up(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    watched.wait_text("members", "SERVING")
    page, place = watched.page, "document.querySelector('[role=log]')"
    # Text longer than the box, appended as tokens are.
    append = """n => { for (let i = 0; i < n; i++) document.querySelector('#answer')
        .append(Object.assign(document.createElement('div'), {textContent: 'line'})) }"""
    gap = f"Math.round({place}.getBoundingClientRect().bottom - {place}.lastElementChild" + (
        ".lastElementChild.getBoundingClientRect().bottom)"
    )
    for _ in range(2):
        page.evaluate(append, 30)
        assert 0 <= page.evaluate(gap) <= 20, "the last line is in sight"
    page.evaluate(f"{place}.scrollBy(0, -200)")
    line = f"{place}.lastElementChild.children[45].getBoundingClientRect().y"
    before = page.evaluate(line)
    page.evaluate(append, 30)
    page.wait_for_timeout(100)
    assert page.evaluate(line) == pytest.approx(before, abs=2), "the text being read stays"


def texts(watched: Watched, name: str) -> str:
    """All text of a part, unfolded or not, with single spaces."""
    cells = watched.part(name).evaluate(
        "e => [...e.querySelectorAll('p, th, td, dt, dd, time, bdi, figcaption')].map(c => c.textContent)"
    )
    return " ".join(" ".join(cells).split())


def test_each_part_says_its_figures(scene: Scene) -> None:
    shown = cluster(5, 4, 16).load
    assert shown is not None
    means_S = (shown.tokens_LS / shown.tokens_LS.mean(axis=1, keepdims=True)).mean(axis=0)
    sums_S = shown.tokens_LS.sum(axis=0)
    loads = [f"{pairs:.0f} {mean:.2f}" for pairs, mean in zip(sums_S, means_S, strict=True)]
    watched = scene("states")
    watched.wait_text("members", "expert-server-1 loads 1.4 of 4.0 GB (35 %), 28.0 MB/s, 93 s left")
    for name, words in (
        (
            "summary",
            "Expert servers 1 of 5 serving Attention clients — Live replicas ≥ 1, on 1 node Epoch 3 PAR 1.20",
        ),
        ("summary", "Bound 1.05 Gap 1.14 Tokens/s"),
        ("summary", "TTFT 200 ms ITL 40 ms"),
        ("events", "0 s ago balancer moved 0 5 s ago balancer moved 1"),
        ("load", "Rows: MoE layers 0 to 3."),
        ("load", "in the last 120 s with load. "),
        ("load", " 0 1 2 3 4 idle mean twice the mean or more Server Pairs"),
        # Pairs, the mean over the layers of the load over the layer's mean, speed.
        *(("load", f"expert-server-{i} {row} 1.00") for i, row in enumerate(loads)),
        ("placement", "13 with 1 live replica, 3 with 2 live replicas."),
        # On a dead server no replica lives.
        ("placement", "expert-server-0 SERVING 7 0, 4-5, 9-10, 14-15"),
        ("placement", "expert-server-4 DEAD 0 3-4, 8-9, 13-14"),
        ("curves", "Requests: 2 running, 0 waiting."),
        ("curves", "PAR: 1.20, bound (dashed) 1.05, gap 1.14 Tokens/s: "),
        ("curves", "Time to first token: 200 ms Inter-token latency: 40 ms"),
        ("decisions", "20 drift eplb moves 1.30 → 1.10 7 it pays 19 drift"),
    ):
        assert words in texts(watched, name), texts(watched, name)


def test_what_is_unknown_or_nothing_is_said(scene: Scene) -> None:
    watched = scene("empty", viewport=WIDE)
    watched.wait_text("load", "The load is not known yet.")
    tiles = (
        "Expert servers — Attention clients — Live replicas — Epoch — PAR — Bound — Gap — Tokens/s"
    )
    assert texts(watched, "summary") == f"{tiles} — TTFT — ITL —"
    assert "The placement is not known yet." in texts(watched, "placement")
    assert "No events since the first viewer opened this page." in texts(watched, "events")
    assert "The balancer has not told its decisions yet." in texts(watched, "decisions")
    scene("idle")
    watched.wait_text("load", "No expert has computed anything in the balancer's window.")
    assert "Tokens/s 0.0 TTFT — ITL —" in texts(watched, "summary")
    assert "The balancer has made no decisions." in texts(watched, "decisions")
    assert watched.page.locator("canvas.map").evaluate_all(
        "all => all.map(c => c.checkVisibility())"
    ) == [False, True]
    assert watched.complaints == []


def test_a_layer_is_chosen_and_its_placement_shown(scene: Scene) -> None:
    watched = scene("small")
    watched.wait_text("placement", "experts 0 to 15")
    watched.page.get_by_role("combobox", name="MoE layer").select_option("3")
    watched.part("placement").get_by_role("img", name=re.compile("^Layer 3:")).wait_for()
    # Servers by layers, experts by servers.
    sizes = watched.page.locator("canvas.map").evaluate_all(
        "all => all.map(c => [c.width, c.height])"
    )
    assert sizes == [[3, 4], [16, 3]]


def test_a_chat_streams_and_can_be_cancelled(scene: Scene) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    message = watched.page.get_by_label("Message")
    message.fill("Hello")
    message.press("Enter")
    watched.page.wait_for_function("() => document.querySelector('#answer').innerText.length > 5")
    send = watched.page.get_by_role("button", name="Send")
    expect(send).to_have_attribute("aria-disabled", "false", timeout=PATIENCE_MS)
    # This answer does not begin.
    watched.page.route("**/v1/chat/completions", lambda _: None)
    send.click()
    watched.page.get_by_role("button", name="Cancel", exact=True).click()
    expect(send).to_have_attribute("aria-disabled", "false", timeout=PATIENCE_MS)
    watched.page.unroute("**/v1/chat/completions")
    assert "The answer failed" not in watched.part("answer").inner_text()


def test_a_refused_chat_says_why(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    watched.wait_text("members", "SERVING")
    # The model's template refuses this message.
    watched.page.get_by_label("Message").fill("refuse")
    watched.page.get_by_role("button", name="Send").click()
    watched.wait_text("answer", "The answer failed: ")
    watched.wait_text("answer", "no such turn")


def test_a_text_has_the_colour_of_the_server_that_computed_most_of_it(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    watched.wait_text("members", "SERVING")
    names = [f"expert-server-{i}" for i in range(9)]
    answer = "".join(
        f"data: {json.dumps({'choices': [], 'servers': {'monitor': 1, name: 2}})}\n\n"
        f"data: {json.dumps({'choices': [{'delta': {'content': name}}]})}\n\n"
        for name in names
    )
    watched.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=answer))
    button(watched, "Send").click()
    watched.wait_text("answer-servers", "monitor 33%")
    watched.wait_text("answer-servers", f"{names[-1]} 7%")
    colour = "getComputedStyle(e).borderBottomColor"
    texts = (
        watched.part("answer")
        .locator("span")
        .evaluate_all(f"all => all.map(e => [e.textContent, {colour}])")
    )
    keys = (
        watched.part("answer-servers")
        .locator("i")
        .evaluate_all(f"all => all.map(e => [e.parentElement.textContent.split(' ')[0], {colour}])")
    )
    assert dict(texts).keys() == set(names)
    assert dict(texts).items() <= dict(keys).items()
    assert len(set(dict(keys).values())) == 10


@pytest.mark.parametrize(("field", "value"), [("Message", "  "), ("Max tokens", "5000")])
def test_a_chat_that_cannot_be_is_not_sent(scene: Scene, field: str, value: str) -> None:
    watched = scene("small", viewport=WIDE)
    watched.wait_text("members", "SERVING")
    watched.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500))
    watched.page.get_by_label(field).fill(value)
    button(watched, "Send").click()
    expect(watched.page.locator("input:invalid")).to_be_focused()
    assert watched.part("answer").inner_text() == ""


def test_updates_keep_elements_and_what_is_open(scene: Scene) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    page = watched.page
    page.get_by_text("Numbers by server").click()
    old = page.evaluate(
        """() => {
            document.querySelector("#members tbody tr").mark = 1;
            return document.querySelector("#load canvas").toDataURL();
        }"""
    )
    page.wait_for_function(
        "old => document.querySelector('#load canvas').toDataURL() !== old", arg=old
    )
    assert page.get_by_role("table", name="Load of each server").is_visible()
    assert page.evaluate("document.querySelector('#members tbody tr').mark") == 1


def test_all_requests_go_to_the_endpoint_without_errors(
    scene: Scene, ui_fixture: UiFixture
) -> None:
    watched = scene("small")
    watched.wait_text("members", "SERVING")
    assert watched.hosts == {httpx.URL(ui_fixture.url).netloc.decode()}
    assert watched.complaints == []


def test_other_paths_belong_to_the_endpoint(ui_fixture: UiFixture) -> None:
    for path in ("/nothing", "/v1/nothing", "/pages", "/eaas/v1/snapshots"):
        answer = httpx.get(f"{ui_fixture.url}{path}", timeout=60)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("No such URL")
    assert httpx.get(f"{ui_fixture.url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"


def test_another_host_name_gives_no_buttons(ui_fixture: UiFixture) -> None:
    """A page of another site could press them if its name resolved to this machine."""
    ui_fixture.show("small")
    port = httpx.URL(ui_fixture.url).port
    for host, has_buttons in (("127.0.0.1", True), ("localhost", True), ("evil.example", False)):
        named = {"host": f"{host}:{port}"}
        snapshot = httpx.get(f"{ui_fixture.url}/eaas/v1/snapshot", headers=named, timeout=60)
        assert snapshot.json()["is_operator"] is has_buttons
        order = {"action": "kill", "member": "expert-server-1", "incarnation": 1}
        asked = httpx.post(
            f"{ui_fixture.url}/eaas/v1/actions", headers=named, json=order, timeout=60
        )
        assert asked.status_code == (200 if has_buttons else 403)


def places(watched: Watched) -> dict[str, Any]:
    """The positions of the members' rows and the servers' buttons, on a wide and a narrow screen."""
    found: dict[str, Any] = {}
    for size, viewport in (("wide", WIDE), ("narrow", NARROW)):
        watched.page.set_viewport_size(viewport)
        found |= watched.page.evaluate(
            """size => Object.fromEntries(
                [...document.querySelectorAll("#operate button, #members button, #members tr")].map(e => {
                    const box = e.getBoundingClientRect();
                    const name = e.ariaLabel ?? (e.querySelector("th") ?? e).textContent;
                    return [[e.tagName, name.replace("?", ""), size].join(" "),
                            [box.x, box.y, box.width, box.height].map(Math.round)];
                }))""",
            size,
        )
    return found


def test_nothing_moves_while_servers_die_leave_and_join(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    button(watched, "Kill expert-server-2").wait_for()
    before = places(watched)
    buttons = {name: place for name, place in before.items() if name.startswith("BUTTON")}
    assert len(buttons) == 2 * 9
    scene("killed")
    watched.part("alerts").filter(has_text="expert-server-1 is DEAD.").wait_for()
    assert places(watched) == before
    # Servers that are forgotten take their buttons with them; others keep their place.
    scene("gone")
    watched.page.wait_for_function(
        "() => document.querySelectorAll('#members tbody tr').length === 3"
    )
    assert {k: v for k, v in buttons.items() if not re.search("-[12] ", k)} == {
        k: v for k, v in places(watched).items() if k.startswith("BUTTON")
    }
    # Servers that return or join get buttons in their rows.
    scene("joined")
    button(watched, "Kill expert-server-3").wait_for()
    assert buttons.items() <= places(watched).items()
    assert button(watched, "Kill expert-server-2").is_enabled()


@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_nothing_moves_when_a_server_becomes_busy(scene: Scene, viewport: Any) -> None:
    watched = scene("small", viewport=viewport)
    button(watched, "Kill expert-server-1").wait_for()
    idle, busy = watched.page.evaluate(
        """() => {
            const values = [...document.querySelectorAll("#members td")];
            const cells = values.filter(e => e.textContent.endsWith("%"));
            const kills = [...document.querySelectorAll("#members button")];
            const shown = cells.map(e => e.textContent);
            const found = ["0%", "100%"].map(text => {
                for (const cell of cells) cell.textContent = text;
                return kills.map(e => e.getBoundingClientRect().x);
            });
            cells.forEach((cell, i) => cell.textContent = shown[i]);
            return found;
        }"""
    )
    assert len(idle) == 2 * 3
    assert idle == busy


def test_a_dialog_confirms_a_kill(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    button(watched, "Kill expert-server-1").wait_for()
    before = places(watched)
    watched.page.set_viewport_size(WIDE)
    ask(watched, "Kill expert-server-1")
    assert places(watched) == before, "the dialog moves nothing"
    watched.page.set_viewport_size(WIDE)
    # The focus is on Cancel, where a key held down does no harm.
    expect(button(watched, "Cancel").last).to_be_focused()
    watched.page.keyboard.press("Enter")
    expect(button(watched, "Kill expert-server-1")).to_be_focused()
    assert status(watched) == ""
    button(watched, "Kill expert-server-1").dblclick()
    button(watched, "Kill expert-server-2").evaluate(
        "b => { for (let i = 0; i < 9; i++) b.click() }"
    )
    watched.page.keyboard.press("Escape")
    assert status(watched) == "", "presses without a pause confirm nothing"
    confirm(watched, "Kill expert-server-1")
    # The server runs on another host, so it gets no signal.
    watched.wait_text("operate-status", "expert-server-1 runs on elsewhere")


def test_a_confirmation_is_for_the_incarnation_that_was_shown(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    dialog = ask(watched, "Kill expert-server-2")
    scene("again")
    dialog.get_by_role("button", name="Kill expert-server-2").click()
    watched.wait_text("operate-status", "expert-server-2 is gone or has restarted")


def test_the_page_fits_and_has_contrast(scene: Scene) -> None:
    watched = scene("states", viewport=WIDE)
    page = watched.page
    for name, part, words in (
        ("states", "members", "JOINING"),
        ("uncovered", "alerts", "5 experts uncovered"),
    ):
        scene(name)
        watched.wait_text(part, words)
        for scheme, size in itertools.product(("light", "dark"), (WIDE, NARROW)):
            page.set_viewport_size(size)
            # Without transitions, which would show intermediate colours.
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.evaluate("document.querySelector('#confirm').show()")
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            # WCAG 1.4.3, AA.
            assert [c for c in contrasts if c[1] < 4.5] == [], (name, scheme, size)


@pytest.mark.parametrize("width", [375, 768, 1280, 1920])
def test_long_names_are_not_cut_off(scene: Scene, width: int) -> None:
    names = [f"expert-server-gpu-node-{i}.rack-7.cluster.example.com" for i in range(3)]
    watched = scene(json.dumps(names), viewport={"width": width, "height": 900})
    watched.wait_text("members", names[2])
    watched.page.locator("details").evaluate_all("all => all.forEach(fold => fold.open = true)")
    watched.wait_text("decisions", names[2])
    # What is wider than the element that hides or scrolls the rest.
    cut = watched.page.evaluate(
        """() => [...document.querySelectorAll("#app *")].filter(e => e.checkVisibility()
            && e.clientWidth > 2 && getComputedStyle(e).overflowX !== "visible"
            && e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 200))"""
    )
    assert cut == []


def test_a_phone_has_large_targets_and_a_short_page(scene: Scene) -> None:
    watched = scene("small", viewport=NARROW, has_touch=True, is_mobile=True)
    button(watched, "Kill expert-server-2").wait_for()
    page = watched.page
    assert page.evaluate("document.querySelector('.page').scrollHeight") < 2000
    folded = page.locator(".card > details")
    assert folded.evaluate_all("all => all.map(e => e.open)") == [False] * 5
    for fold in folded.all():
        fold.locator("summary").first.tap()
    assert watched.part("decisions").locator("table").is_visible()
    targets = page.evaluate(
        """() => [...document.querySelectorAll("button, summary, input, select")]
            .filter(e => e.checkVisibility())
            .map(e => [e.ariaLabel ?? e.textContent ?? e.id, e.getBoundingClientRect().height])"""
    )
    assert len(targets) > 18
    assert [t for t in targets if t[1] < 44] == []

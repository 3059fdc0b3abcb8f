"""The page under a hand: nothing moves, a kill is confirmed, all of it can be read, reached and pressed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from browser import Watched

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WIDE, NARROW = {"width": 1280, "height": 844}, {"width": 390, "height": 844}
# Longer than a double click, and a second is shorter than a button asks.
A_WHILE_MS = 600
SHOWN_STATES = {
    "small": "SERVING",
    "killed": "DEAD",
    "states": "JOINING",
    "uncovered": "DEAD",
    "again": "SERVING",
}

Scene = Callable[..., Watched]


def wait_for(watched: Watched, scene: str) -> None:
    """Until the page shows it."""
    watched.wait_text("members", SHOWN_STATES[scene])
    watched.part("operate-servers").locator("button").first.wait_for()


def places(watched: Watched) -> dict[str, Any]:
    """Where the members' rows and the servers' buttons are, on the page."""
    return dict(
        watched.page.evaluate(
            """() => Object.fromEntries(
                [...document.querySelectorAll("#operate button, #members tbody tr")].map(e => {
                    const box = e.getBoundingClientRect();
                    const name = e.ariaLabel ?? e.querySelector("th").textContent;
                    return [e.tagName + name.replace("?", ""),
                            [box.x, box.y + scrollY, box.width, box.height].map(Math.round)];
                }))"""
        )
    )


def button(watched: Watched, name: str) -> Any:
    return watched.page.get_by_role("button", name=name, exact=True)


def said(watched: Watched) -> str:
    return str(watched.part("operate-said").inner_text())


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_moves_while_servers_die_leave_and_come(scene: Scene, size: dict[str, int]) -> None:
    watched = scene("small", viewport=size)
    wait_for(watched, "small")
    before = places(watched)
    assert sum(name.startswith("BUTTON") for name in before) == 9
    button(watched, "Kill expert-server-1").click()
    watched.page.wait_for_timeout(A_WHILE_MS)
    button(watched, "Kill expert-server-1?").click()
    watched.wait_text("operate-said", "expert-server-1 runs on elsewhere")
    assert places(watched) == before
    scene("killed")
    watched.part("alerts").filter(has_text="expert-server-1 is DEAD.").wait_for()
    assert places(watched) == before
    # All but one have left: what is there no more has nothing to press, and its place.
    scene("gone")
    watched.page.wait_for_function(
        "() => document.querySelectorAll('#members tbody tr').length === 3"
    )
    after = places(watched)
    buttons = {name: place for name, place in before.items() if name.startswith("BUTTON")}
    assert buttons.items() <= after.items()
    assert button(watched, "Kill expert-server-0").is_enabled()
    assert not button(watched, "Kill expert-server-2").is_enabled()
    # Newcomers stand behind those that were there.
    scene("joined")
    button(watched, "Kill expert-server-3").wait_for()
    assert buttons.items() <= places(watched).items()
    assert button(watched, "Kill expert-server-2").is_enabled()


@pytest.mark.parametrize("verb", ["Kill", "Pause"])
def test_a_double_click_asks_and_a_second_press_confirms(scene: Scene, verb: str) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    before = places(watched)
    name = f"{verb} expert-server-1"
    button(watched, name).dblclick()
    asking = button(watched, f"{name}?")
    asking.wait_for()
    assert asking.inner_text().split() == f"{verb} expert-server-1 ?".split()
    assert places(watched) == before, "it keeps its place and size"
    watched.page.wait_for_timeout(A_WHILE_MS)
    assert said(watched) == ""
    assert watched.page.get_by_role("button", name=re.compile(r"\?$")).count() == 1
    asking.click()
    # These servers are elsewhere, and left alone: one attempt, at the right one.
    watched.wait_text("operate-said", "expert-server-1 runs on elsewhere")
    button(watched, name).wait_for()


def test_a_question_ends_by_itself_and_with_the_life_that_it_is_about(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    button(watched, "Kill expert-server-0").click()
    button(watched, "Kill expert-server-0?").wait_for()
    button(watched, "Kill expert-server-0").wait_for()
    button(watched, "Kill expert-server-2").click()
    button(watched, "Kill expert-server-2?").wait_for()
    scene("again")
    button(watched, "Kill expert-server-2").wait_for(timeout=4000)
    assert said(watched) == ""


def test_a_kill_is_confirmed_by_keyboard(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    # A key that is held down repeats: presses without a pause are one.
    button(watched, "Kill expert-server-2").evaluate(
        "b => { for (let i = 0; i < 9; i++) b.click() }"
    )
    button(watched, "Kill expert-server-2?").wait_for()
    button(watched, "Kill expert-server-2").wait_for()
    assert said(watched) == ""
    button(watched, "Kill expert-server-2").focus()
    watched.page.keyboard.press("Enter")
    asking = button(watched, "Kill expert-server-2?")
    asking.wait_for()
    expect(asking).to_be_focused()
    assert asking.get_attribute("aria-description") == "Press again to confirm"
    assert said(watched) == ""
    watched.page.wait_for_timeout(A_WHILE_MS)
    watched.page.keyboard.press("Enter")
    watched.wait_text("operate-said", "expert-server-2 runs on elsewhere")


def test_a_dead_servers_buttons_do_nothing(scene: Scene) -> None:
    watched = scene("killed", viewport=WIDE)
    wait_for(watched, "killed")
    kill = button(watched, "Kill expert-server-1")
    expect(kill).to_be_disabled()
    for _ in range(2):
        kill.dispatch_event("click")
        watched.page.wait_for_timeout(A_WHILE_MS)
    assert said(watched) == ""
    assert watched.page.get_by_role("button", name=re.compile(r"\?$")).count() == 0


def test_the_banner_is_in_sight_wherever_one_reads(scene: Scene) -> None:
    watched = scene("killed", viewport=NARROW)
    wait_for(watched, "killed")
    banner = watched.page.get_by_role("alert").filter(has_text="expert-server-1 is DEAD.")
    for y in (0, 500, 10_000):
        watched.page.evaluate("y => scrollTo(0, y)", y)
        expect(banner).to_be_in_viewport()
    # The last line of the page can be read above it.
    last, top = watched.page.evaluate(
        """() => [document.querySelector("#decisions").getBoundingClientRect().bottom,
                  document.querySelector("#alerts").getBoundingClientRect().top]"""
    )
    assert last <= top


def test_tile_placement_and_banner_tell_one_story(scene: Scene) -> None:
    watched = scene("killed")
    watched.part("alerts").filter(has_text="expert-server-1 is DEAD.").wait_for()
    assert "≥ 1 of each" in watched.part("summary").inner_text()
    assert (
        "11 with 1 live replica, 5 with 2 live replicas." in watched.part("placement").inner_text()
    )
    # Over four layers.
    assert "44 have 1 live replica left" in watched.part("alerts").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_fits_and_can_be_read(scene: Scene, size: dict[str, int], scheme: str) -> None:
    for name in ("states", "uncovered"):
        watched = scene(name, viewport=size, color_scheme=scheme)
        wait_for(watched, name)
        page = watched.page
        for fold in page.query_selector_all('.fold[aria-expanded="false"]'):
            fold.click()
        button(watched, "Kill expert-server-0").click()
        button(watched, "Kill expert-server-0?").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        # Of text against what is behind it (WCAG 1.4.3, AA).
        contrasts = page.evaluate(_CONTRASTS)
        assert len(contrasts) > 60
        assert [c for c in contrasts if c[1] < 4.5] == []


def test_on_a_phone_targets_are_large_and_the_page_is_short(scene: Scene) -> None:
    watched = scene("small", viewport=NARROW, has_touch=True, is_mobile=True)
    wait_for(watched, "small")
    page = watched.page
    assert page.evaluate("document.documentElement.scrollHeight") < 2000
    folded = page.locator("#load, #placement, #curves, #events, #decisions").get_by_role("button")
    assert folded.evaluate_all("all => all.map(e => e.ariaExpanded)") == ["false"] * 5
    for fold in folded.all():
        fold.tap()
    assert watched.part("decisions").is_visible()
    targets = page.evaluate(
        """() => [...document.querySelectorAll("button, summary, input, select, [role=combobox]")]
            .filter(e => e.checkVisibility())
            .map(e => [e.ariaLabel ?? e.textContent ?? e.id,
                       (e.closest(".q-field__control") ?? e).getBoundingClientRect().height])"""
    )
    assert len(targets) > 18
    assert [t for t in targets if t[1] < 44] == []
    # And the choices that open.
    page.get_by_label("MoE layer").tap()
    option = page.get_by_role("option", name="3", exact=True)
    option.wait_for()
    assert option.bounding_box()["height"] >= 44


def test_headings_are_in_order_and_all_controls_are_named(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    levels = watched.page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(e => +e.tagName[1])"
    )
    assert levels == [1] + [2] * 8
    buttons = watched.page.get_by_role("button").evaluate_all(
        "all => all.map(e => e.ariaLabel ?? e.textContent.trim())"
    )
    assert {"Send", "Cancel", "Pause expert-server-0", "Rebalance now"} <= set(buttons)
    assert all(buttons)
    assert not {"End", "Stop", "Continue"} & {b.split()[0] for b in buttons}
    # What is read aloud has in it what is seen (WCAG 2.5.3).
    pairs = watched.page.get_by_role("button").evaluate_all(
        "all => all.filter(e => e.ariaLabel).map(e => [e.ariaLabel, [...e.children].map(c => c.textContent)])"
    )
    assert all(" ".join(filter(None, seen)) in label for label, seen in pairs)


def test_what_has_the_focus_is_seen(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    for _ in range(22):
        watched.page.keyboard.press("Tab")
        seen = watched.page.evaluate(
            """() => {
                const e = document.activeElement;
                // A field's frame shows it.
                const field = e.closest(".q-field")?.classList.contains("q-field--focused");
                const style = getComputedStyle(e);
                return [e.outerHTML.slice(0, 90),
                        field || (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2)];
            }"""
        )
        assert seen[1], seen[0]


def test_what_was_opened_stays_open_and_is_the_same_element(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    page = watched.page
    page.get_by_text("Figures of the servers").click()
    old = page.evaluate(
        """() => {
            document.querySelector("#members tbody tr").mark = 1;
            return document.querySelector("#load img").src;
        }"""
    )
    page.wait_for_function("old => document.querySelector('#load img').src !== old", arg=old)
    assert page.get_by_role("table", name="Load of each server").is_visible()
    assert page.evaluate("document.querySelector('#members tbody tr').mark") == 1


def test_curves_have_scales_units_and_a_legend(scene: Scene) -> None:
    watched = scene("small", viewport=WIDE)
    wait_for(watched, "small")
    for title, scale, legend in (
        ("PAR", ["1.4", "1.2", "1"], ["PAR", "bound"]),
        ("Tokens/s", ["100 /s", "50 /s", "0 /s"], ["mean of the last 10 s"]),
        ("Time to first token", ["200 ms", "100 ms", "0 ms"], ["mean of the last 10 s"]),
    ):
        figure = watched.part("curves").locator("figure").filter(has_text=f"{title}: ")
        assert figure.locator(".scale span").all_inner_texts() == scale
        assert figure.locator(".times span").all_inner_texts() == ["5 min ago", "now"]
        assert figure.locator(".lines > span").all_inner_texts() == legend
        assert figure.get_by_role("img", name=f"{title} over the last 300 s").count() == 1


_CONTRASTS = """
() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  // Whatever notation a colour has, as red, green, blue and alpha.
  const parse = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under, fade) => {
    const alpha = top[3] * fade;
    return top.slice(0, 3).map((v, i) => v * alpha + under[i] * (1 - alpha));
  };
  const light = c => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const e of document.querySelectorAll("#app *")) {
    const text = e.tagName === "INPUT" ? e.value
      : [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join("").trim();
    if (!text || e.closest(".unseen, .skip") || e.offsetWidth < 2 || !e.checkVisibility()) continue;
    let ground = [255, 255, 255], fade = 1;
    const chain = [];
    for (let a = e; a; a = a.parentElement) chain.unshift(getComputedStyle(a));
    for (const style of chain) {
      fade *= style.opacity;
      ground = over(parse(style.backgroundColor), ground, fade);
    }
    const ink = over(parse(getComputedStyle(e).color), ground, fade);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    found.push([`${e.tagName}.${e.className}: ${text}`.slice(0, 90), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}
"""

"""A real Chromium, headless: Debian's, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["CONTRASTS", "NARROW", "PATIENCE_MS", "WIDE", "Watched", "chromium", "open_page"]

# For a busy machine.
PATIENCE_MS = 60_000
WIDE, NARROW = {"width": 1280, "height": 844}, {"width": 390, "height": 844}


class Watched:
    """A page, its console errors, and the hosts of its requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)
        page.on("request", lambda request: self._request(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _request(self, url: str) -> None:
        if not url.startswith("data:"):
            self.hosts.add(urlsplit(url).netloc)

    def part(self, name: str) -> Any:
        """A section of the page."""
        return self.page.locator(f"#{name}")

    def wait_text(self, name: str, words: str) -> None:
        """Wait until a section has these words."""
        self.part(name).filter(has_text=words).first.wait_for(state="attached")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser; skip the test if there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as driver:
        # Chromium has no sandbox for root in a container.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, **context: Any) -> Iterator[Watched]:
    """Open a page in a new context: no cookies, no passwords."""
    opened = browser.new_context(**context)
    try:
        watched = Watched(opened.new_page())
        watched.page.goto(url)
        yield watched
    finally:
        opened.close()


CONTRASTS = """
() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  // A colour in any notation, as red, green, blue and alpha.
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
"""A script that returns the contrast ratio (WCAG 1.4.3) of each visible text, with its element."""

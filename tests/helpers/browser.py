"""A real Chromium, headless: Debian's, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["PATIENCE_MS", "Watched", "chromium", "open_page"]

# Long against a busy machine; what is waited for takes a fraction of it.
PATIENCE_MS = 60_000


class Watched:
    """A page, what it complained of, and where it sent requests."""

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
        """A drawn part of the page."""
        return self.page.locator(f'[data-part="{name}"]')

    def wait_text(self, name: str, words: str) -> None:
        """Until a part has these words."""
        self.part(name).filter(has_text=words).first.wait_for(state="attached")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; the test is skipped where there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as driver:
        # Root has no sandbox in a container.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, **context: Any) -> Iterator[Watched]:
    """A page of its own, without another one's cookies or passwords."""
    opened = browser.new_context(**context)
    try:
        watched = Watched(opened.new_page())
        watched.page.goto(url)
        yield watched
    finally:
        opened.close()

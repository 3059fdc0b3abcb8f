"""Servers and browsers of the tests of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from typing import Any

import pytest

from browser import WIDE, Watched, chromium, open_page
from eaas_cli.local.fork_server import ForkServer
from http_box import Box
from ui_fixture import UiFixture


@pytest.fixture(scope="session")
def boxes() -> Iterator[Callable[[str], Box]]:
    """The server over each kind of tiny model, for all files."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(Box(kind)))


@pytest.fixture(scope="module")
def shared_box(boxes: Callable[[str], Box]) -> Box:
    return boxes("qwen3_moe")


@pytest.fixture
def box(shared_box: Box) -> Iterator[Box]:
    """The shared server; healthy and idle after each test."""
    yield shared_box
    shared_box.error, shared_box.slow_s, shared_box.good = None, 0.0, (True, "")
    shared_box.wait_idle()


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def engine(request: pytest.FixtureRequest, boxes: Callable[[str], Box]) -> Box:
    """A server with continuous batching, and one that runs one request at a time."""
    return boxes(request.param)


@pytest.fixture
def own_box() -> Iterator[Box]:
    """A server that the test may break."""
    with Box() as box:
        yield box


@pytest.fixture(scope="session")
def ui_fixture(fork_server: ForkServer) -> Iterator[UiFixture]:
    with closing(UiFixture(fork_server)) as ui_fixture:
        yield ui_fixture


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Any, ui_fixture: UiFixture) -> Iterator[Watched]:
    with open_page(browser, ui_fixture.url, viewport=WIDE) as watched:
        yield watched


@pytest.fixture
def scene(browser: Any, ui_fixture: UiFixture, page: Watched) -> Iterator[Callable[..., Watched]]:
    """Shows a scene on the shared page; with arguments of a browser context on a new page."""
    page.page.set_viewport_size(WIDE)
    with ExitStack() as stack:

        def show(name: str, **context: Any) -> Watched:
            ui_fixture.show(name)
            if not context:
                return page
            return stack.enter_context(open_page(browser, ui_fixture.url, **context))

        yield show

"""Servers and browsers of the tests of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from browser import WIDE, Watched, chromium, open_page
from eaas_cli.local.fork_server import ForkServer
from http_box import Box
from ui_fixture import UiFixture

HERE = Path(__file__).parent
_running = ExitStack()


@cache
def running(kind: str) -> Box:
    """The server over a kind of tiny model, for all files here."""
    return _running.enter_context(Box(kind))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the servers after the last test here: the tests of other files share their process."""
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        running.cache_clear()
        _running.close()


@pytest.fixture(scope="module")
def boxes() -> Callable[[str], Box]:
    return running


@pytest.fixture(scope="module")
def shared_box() -> Box:
    return running("qwen3_moe")


@pytest.fixture
def box(shared_box: Box) -> Iterator[Box]:
    """The shared server; healthy and idle after each test."""
    yield shared_box
    shared_box.error, shared_box.slow_s, shared_box.good = None, 0.0, (True, "")
    shared_box.wait_idle()


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def engine(request: pytest.FixtureRequest) -> Box:
    """A server with continuous batching, and one that runs one request at a time."""
    return running(request.param)


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

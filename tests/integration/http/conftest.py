"""Servers that the tests of the HTTP face ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from browser import Watched, chromium, open_page
from eaas.local.nursery import Nursery
from http_box import Box
from theatre import Theatre


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Box]:
    box = Box()
    yield box
    box.close()


@pytest.fixture
def box(shared_box: Box) -> Iterator[Box]:
    """The shared server, good and idle again afterwards."""
    yield shared_box
    shared_box.error, shared_box.slow_s, shared_box.good = None, 0.0, (True, "")
    shared_box.wait_idle()


@pytest.fixture
def own_box() -> Iterator[Box]:
    """A server that the test may ruin."""
    box = Box()
    yield box
    box.close()


@pytest.fixture(scope="module")
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def browser(cleanup: ExitStack) -> Any:
    return cleanup.enter_context(chromium())


@pytest.fixture(scope="module")
def theatre(browser: Any, cleanup: ExitStack, nursery: Nursery) -> Theatre:
    theatre = Theatre(nursery)
    cleanup.callback(theatre.close)
    return theatre


@pytest.fixture(scope="module")
def page(browser: Any, theatre: Theatre, cleanup: ExitStack) -> Watched:
    return cleanup.enter_context(open_page(browser, theatre.url))


@pytest.fixture
def scene(browser: Any, theatre: Theatre, page: Watched) -> Iterator[Callable[..., Watched]]:
    """A scene on the page that is open already; on one of its own where that is to be another one."""
    with ExitStack() as stack:

        def show(name: str, **context: Any) -> Watched:
            theatre.show(name)
            if not context:
                return page
            return stack.enter_context(open_page(browser, theatre.url, **context))

        yield show

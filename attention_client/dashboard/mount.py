"""Where the dashboard hangs in the endpoint's application. NiceGUI is imported with the first look at it.

Browsers poll (no WebSocket): whatever the endpoint asks of a request, a key above all, it asks of each of
the page's, and an idle endpoint keeps none open.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sized
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from attention_client.dashboard.hub import Hub, Looker
from attention_client.dashboard.operator import Operator
from attention_client.dashboard.talk import Talk

__all__ = ["Dashboard", "is_page_path"]

_TITLE = "Expert-as-a-Service"
# Each page takes about 0.3 MB, for a minute at least, be it that nobody ever looks at it.
_MOST_PAGES = 100
# NiceGUI and Vue compile templates in the browser ('unsafe-eval') and write scripts into the page. Nothing
# comes from, or goes to, anywhere else, and nobody may put the page into a frame.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def is_page_path(path: str) -> bool:
    """Whether a path is the dashboard's."""
    return path in ("/", "/favicon.ico") or path.startswith(("/_nicegui/", "/_nicegui_ws/"))


class Dashboard(BaseRoute):
    """The page and its assets, as one route of an application. One in a process: NiceGUI is.

    Args:
        open_looker: Makes what the facts come from.
        operator: What buttons do; None: there are none.
    """

    def __init__(self, open_looker: Callable[[], Looker], operator: Operator | None = None) -> None:
        self.hub = Hub(open_looker)
        self._operator = operator
        self._name = ""
        self._talk: Talk | None = None
        self._lock = asyncio.Lock()
        self._running = AsyncExitStack()
        self._pages: Any = None
        self._open: Sized = ()

    def serve(self, name: str, talk: Talk) -> None:
        """What the page shows of the model, before the first request.

        Args:
            name: The model's.
            talk: Asks it.
        """
        self._name, self._talk = name, talk

    # -- Starlette's route -----------------------------------------------------------------------------

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Its own paths, and no others: what is unknown is the endpoint's to refuse."""
        own = scope["type"] == "http" and is_page_path(scope["path"])
        return (Match.FULL if own else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        async with self._lock:
            if self._pages is None:
                self._pages = await self._begin()
        if scope["path"] == "/" and len(self._open) >= _MOST_PAGES:
            full = PlainTextResponse(
                "Too many of these pages are open: close some, and try again in a minute.\n",
                status_code=503,
                headers={"retry-after": "60"},
            )
            await full(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if scope["path"] == "/":
                    headers["cache-control"] = "no-store"
            await send(message)

        await self._pages(scope, receive, guarded_send)

    async def close(self) -> None:
        """Lets the viewers' requests end: the server waits for them."""
        await self.hub.close()
        await self._running.aclose()

    # -- NiceGUI ---------------------------------------------------------------------------------------

    async def _begin(self) -> Any:
        # A second or so: meanwhile answers go on.
        await asyncio.get_running_loop().run_in_executor(None, _import)
        import nicegui
        from fastapi import FastAPI
        from nicegui import core, ui

        from attention_client.dashboard.page import PageParts, build_page

        assert self._talk is not None
        parts = PageParts(self._name, self.hub, self._talk, self._operator or Operator())
        css = Path(__file__).with_name("page.css").read_text("utf-8")

        @ui.page("/")
        def page(client: nicegui.Client) -> None:
            ui.add_head_html(f"<style>{css}</style>")
            ui.colors(primary="#1d4ed8", negative="#b91c1c")
            buttons = self._operator is not None and _is_local(client.request.url.hostname)
            build_page(client, parts, buttons=buttons)

        pages = FastAPI(openapi_url=None)
        ui.run_with(
            pages,
            title=_TITLE,
            dark=None,
            language="en-US",
            tailwind=False,
            binding_refresh_interval=None,
            reconnect_timeout=10.0,
            gzip_middleware_factory=None,
            show_welcome_message=False,
        )
        core.app.config.socket_io_js_transports = ["polling"]
        # What goes out once a second is not worth packing.
        core.sio.eio.http_compression = False
        core.sio.eio.cors_allowed_origins = []
        await self._running.enter_async_context(pages.router.lifespan_context(pages))
        self._running.push_async_callback(_disconnect_all)
        self._open = nicegui.Client.instances
        return pages


def _import() -> None:
    import nicegui  # noqa: F401 (only so that it is there)


async def _disconnect_all() -> None:
    """Requests that wait for news get an answer, and do not come again."""
    from nicegui import core

    await core.sio.shutdown()


def _is_local(host: str | None) -> bool:
    """Whether a page was asked for by an address, or as localhost.

    A name may be anybody's that leads here: a page of theirs could press the buttons.
    """
    if host is None or host == "localhost":
        return host is not None
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True

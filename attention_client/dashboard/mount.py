"""Where the dashboard hangs in the endpoint's application. NiceGUI is imported with the first look at it.

Browsers poll (no WebSocket): whatever the endpoint asks of a request, a key above all, it asks of each of
the page's, and an idle endpoint keeps none open.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Callable, Sized
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, PlainTextResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from attention_client.dashboard import policy
from attention_client.dashboard.hub import Hub, Looker
from attention_client.dashboard.operator import Operator
from attention_client.dashboard.talk import Talk
from attention_client.dashboard.token import OperatorToken
from eaas.server_records import OPERATOR_PATH

__all__ = ["Dashboard", "is_page_path"]

_TITLE = "Expert-as-a-Service"
# Each page takes about 0.3 MB, for a minute at least, be it that nobody ever looks at it.
_MOST_PAGES = 100
_STYLE_SHEET = "/dashboard.css"


def is_page_path(path: str) -> bool:
    """Whether a path is the dashboard's."""
    own = ("/", "/favicon.ico", _STYLE_SHEET)
    return path in own or path.startswith(("/_nicegui/", "/_nicegui_ws/", OPERATOR_PATH))


class Dashboard(BaseRoute):
    """The page and its assets, as one route of an application. One in a process: NiceGUI is.

    Args:
        open_looker: Makes what the facts come from.
        operator: What buttons do; None: there are none.
        token: What viewers show to get the buttons; None: nothing.
    """

    def __init__(
        self,
        open_looker: Callable[[], Looker],
        operator: Operator | None = None,
        token: OperatorToken | None = None,
    ) -> None:
        self.hub = Hub(open_looker)
        self._operator = operator
        self._token = token
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
        if policy.is_foreign(scope["path"], Headers(scope=scope)):
            refusal = PlainTextResponse(
                "Another site's page has sent this request: open the dashboard by its own address.\n",
                status_code=403,
            )
            await refusal(scope, receive, send)
            return
        if self._token is not None and (login := self._token.login(scope)) is not None:
            await login(scope, receive, send)
            return
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

        await self._pages(scope, receive, _guarded(send, is_page=scope["path"] == "/"))

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

        @ui.page("/")
        def page(client: nicegui.Client) -> None:
            ui.add_head_html('<link rel="stylesheet" href="dashboard.css">')
            buttons = self._operator is not None and _is_local(client.request.url.hostname)
            token = self._token
            if buttons and token is not None and not token.is_operator(client.request.headers):
                buttons = False
                ui.label("Read-only: for the buttons, open the address that `eaas status` prints.")
            build_page(client, parts, buttons=buttons)

        pages = FastAPI(openapi_url=None)

        @pages.get(_STYLE_SHEET)
        def style_sheet() -> FileResponse:
            return FileResponse(Path(__file__).with_name("page.css"))

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


def _guarded(send: Send, *, is_page: bool) -> Send:
    """Adds the page's policy to a response, and its nonce to the scripts of the page itself."""
    nonce = secrets.token_urlsafe(18)
    held: list[Message] = []
    html: list[bytes] = []

    async def guarded_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(policy.headers(nonce))
            if is_page:
                headers["cache-control"] = "no-store"
                # Its length is known once the nonces are in it.
                held.append(message)
                return
        elif is_page and message["type"] == "http.response.body":
            html.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            body = policy.with_nonce(b"".join(html), nonce)
            MutableHeaders(scope=held[0])["content-length"] = str(len(body))
            await send(held[0])
            message = {"type": "http.response.body", "body": body}
        await send(message)

    return guarded_send


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

"""The dashboard's route in the HTTP application. The first request for the page imports NiceGUI.

Browsers poll; there is no WebSocket. So the endpoint checks every request of the page, including its API key,
and an idle endpoint holds no connection open.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Callable, Sized
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from attention_client.serving.dashboard import policy
from attention_client.serving.dashboard.broadcaster import Broadcaster, Poller
from attention_client.serving.dashboard.chat_source import ChatSource
from attention_client.serving.dashboard.operator import Operator
from attention_client.serving.dashboard.token import OperatorToken
from eaas.net.server_records import OPERATOR_PATH

__all__ = ["Dashboard", "is_page_path"]

_TITLE = "Expert-as-a-Service"
# A page holds about 0.3 MB for at least a minute, even without a viewer.
_MOST_PAGES = 100
_STYLE_SHEET = "/dashboard.css"


def is_page_path(path: str) -> bool:
    """Whether an HTTP path belongs to the dashboard, where a password may stand for the API key."""
    own = ("/", "/favicon.ico", _STYLE_SHEET)
    return path in own or path.startswith(("/_nicegui/", "/_nicegui_ws/", OPERATOR_PATH))


class Dashboard(BaseRoute):
    """Serves the page and its assets as one route. At most one in a process, because of NiceGUI.

    Args:
        open_poller: Makes the source of snapshots.
        operator: Runs the actions of the buttons; None: no buttons.
        token: The token that viewers must present to get the buttons; None: no token is needed.
    """

    def __init__(
        self,
        open_poller: Callable[[], Poller],
        operator: Operator | None = None,
        token: OperatorToken | None = None,
    ) -> None:
        self.broadcaster = Broadcaster(open_poller)
        self._operator = operator
        self._token = token
        self._name = ""
        self._chat: ChatSource | None = None
        self._lock = asyncio.Lock()
        self._running = AsyncExitStack()
        self._pages: Any = None
        self._open: Sized = ()

    def serve(self, name: str, chat: ChatSource) -> None:
        """Set the model's name and the engine of the chat box. The endpoint calls it before any request."""
        self._name, self._chat = name, chat

    # -- Starlette's route -----------------------------------------------------------------------------

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the dashboard's paths only; the application refuses unknown ones."""
        own = scope["type"] == "http" and is_page_path(scope["path"])
        return (Match.FULL if own else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request for the dashboard, after the guard's checks; the first imports NiceGUI."""
        answer: Response | None = None
        is_page = scope["path"] == "/"
        if policy.is_foreign(scope["path"], Headers(scope=scope)):
            text = "A page of another site sent this request. Open the dashboard's own address.\n"
            answer = PlainTextResponse(text, 403)
        elif self._token is not None:
            answer = self._token.login(scope)
        if answer is None:
            async with self._lock:
                if self._pages is None:
                    self._pages = await self._begin()
            if is_page and len(self._open) >= _MOST_PAGES:
                text = "Too many dashboard pages are open. Close some and try again in a minute.\n"
                answer = PlainTextResponse(text, 503, {"retry-after": "60"})
        if answer is not None:
            await answer(scope, receive, send)
        else:
            await self._pages(scope, receive, _guarded(send, is_page=is_page))

    async def close(self) -> None:
        """End the viewers' requests, because the stopping server waits for them."""
        await self.broadcaster.close()
        await self._running.aclose()

    # -- NiceGUI ---------------------------------------------------------------------------------------

    async def _begin(self) -> Any:
        # The import takes about a second. In the executor it does not block other requests.
        await asyncio.get_running_loop().run_in_executor(None, import_module, "nicegui")
        import nicegui
        from fastapi import FastAPI
        from nicegui import core, ui

        from attention_client.serving.dashboard.page import build_page

        chat, token = self._chat, self._token
        assert chat is not None

        @ui.page("/")
        def page(client: nicegui.Client) -> None:
            ui.add_head_html('<link rel="stylesheet" href="dashboard.css">')
            operator = self._operator if _is_local(client.request.url.hostname) else None
            if operator and token and not token.is_operator(client.request.headers):
                operator = None
                ui.label(
                    "Read-only. To get the buttons, open the address that `eaas status` prints."
                ).classes("note")
            build_page(client, self._name, self.broadcaster, chat, operator)

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
        # Small messages once a second are not worth compressing.
        core.sio.eio.http_compression = False
        core.sio.eio.cors_allowed_origins = []
        await self._running.enter_async_context(pages.router.lifespan_context(pages))
        self._running.push_async_callback(_disconnect_all)
        self._open = nicegui.Client.instances
        return pages


def _guarded(send: Send, *, is_page: bool) -> Send:
    """Add the page's policy to a response, and the nonce to the scripts of the page."""
    nonce = secrets.token_urlsafe(18)
    held: list[Message] = []
    html: list[bytes] = []

    async def guarded_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(policy.headers(nonce))
            if is_page:
                headers["cache-control"] = "no-store"
                # The length is known after the nonces are inserted.
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


async def _disconnect_all() -> None:
    """Answer the browsers' pending polls, so that they do not poll again."""
    from nicegui import core

    await core.sio.shutdown()


def _is_local(host: str | None) -> bool:
    """Whether the URL of a page has an IP address or localhost as its host.

    Anyone can register a name that resolves to this machine, and their page could press the buttons.
    """
    if host is None or host == "localhost":
        return host is not None
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True

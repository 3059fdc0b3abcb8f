"""The dashboard's route in the HTTP application: static files, a JSON document, and the buttons' actions.

Browsers poll; there is no WebSocket. So the endpoint checks every request of the page, including its API key,
and an idle endpoint holds no connection open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from eaas.cluster_snapshot import ClusterSnapshot, SnapshotReader
from eaas.cluster_snapshot.document import encode, page_document
from eaas.errors import EaasError
from eaas.log import get_logger
from eaas.net.server_records import OPERATOR_PATH
from frontend.dashboard import viewers
from frontend.dashboard.operator import Operator, paused

__all__ = ["Dashboard"]

_log = get_logger(__name__)
_CLOSE_S = 1.0
_FAILED = "The cluster cannot be shown. The data below is old. The endpoint's log has the reason."


class Dashboard(BaseRoute):
    """Serves the page. It reads the cluster only for viewers: once a period for all of them together.

    Args:
        open_reader: Makes the source of snapshots.
        operator: Runs the actions of the buttons; None: no buttons.
        token: The token that viewers must present to get the buttons; None: no token is needed.
        period_s: Seconds between two readings.
    """

    def __init__(
        self,
        open_reader: Callable[[], SnapshotReader],
        operator: Operator | None = None,
        token: viewers.OperatorToken | None = None,
        period_s: float = 1.0,
    ) -> None:
        self._open_reader, self._operator, self._token = open_reader, operator, token
        self._files = StaticFiles(directory=Path(__file__).with_name("static"))
        self._page: dict[str, Any] = {"period_s": period_s}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard")
        self._reading = asyncio.Lock()
        self._reader: SnapshotReader | None = None
        self._snapshot = ClusterSnapshot()
        self._error, self._read_at = "", float("-inf")
        # JSON of the newest snapshot, by MoE layer and whether the viewer is an operator.
        self._documents: dict[tuple[int, bool], bytes] = {}

    def serve(self, model: str, *, has_chat: bool, names_servers: bool) -> None:
        """Set what the page's chat asks the endpoint for, before any request.

        Args:
            model: The model's name.
            has_chat: The model has a chat template; if not, the message is continued.
            names_servers: The endpoint can name the servers that computed a token.
        """
        self._page |= {"model": model, "has_chat": has_chat, "names_servers": names_servers}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the dashboard's paths only; the application refuses unknown ones."""
        own = scope["type"] == "http" and viewers.is_page_path(scope["path"])
        return (Match.FULL if own else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request for the dashboard, after the endpoint's checks."""
        try:
            answer = await self._answer(Request(scope, receive), scope["path"])
        except HTTPException as error:
            answer = PlainTextResponse(f"{error.detail}\n", error.status_code)
        answer.headers.update(viewers.HEADERS)
        await GZipMiddleware(answer, compresslevel=1)(scope, receive, send)

    async def close(self) -> None:
        """End the connections to the cluster, when the endpoint stops. Waits at most a second."""
        self._read_at = float("inf")
        if self._reader is not None:
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._reader.close)
            await asyncio.wait({closing}, timeout=_CLOSE_S)
        self._thread.shutdown(wait=False)

    async def _answer(self, request: Request, path: str) -> Response:
        if viewers.is_foreign(path, request.headers):
            text = "A page of another site sent this request. Open the dashboard's own address."
            raise HTTPException(403, text)
        if path.startswith(OPERATOR_PATH) and self._token is not None:
            return self._token.login(path.removeprefix(OPERATOR_PATH).rstrip("/"))
        if path == viewers.ACTIONS_PATH:
            return await self._act(request)
        if path == viewers.SNAPSHOT_PATH:
            return await self._document(request)
        name = "index.html" if path == "/" else path.removeprefix(viewers.FILES_PATH)
        answer = await self._files.get_response(name, request.scope)
        # Browsers ask whether a file has changed, so an update of the endpoint updates the page.
        answer.headers["cache-control"] = "no-cache"
        return answer

    async def _document(self, request: Request) -> Response:
        layer = request.query_params.get("layer", "")
        key = int(layer[:6]) if layer.isdecimal() else 0, self._may_act(request)
        async with self._reading:
            await self._read()
            if key not in self._documents:
                self._documents[key] = await run_in_threadpool(self._encode, *key)
        headers = {"cache-control": "no-store"}
        return Response(self._documents[key], media_type="application/json", headers=headers)

    def _encode(self, layer: int, is_operator: bool) -> bytes:
        found = self._page | page_document(self._snapshot, layer)
        # Null: nobody gets buttons here.
        found["is_operator"] = None if self._operator is None else is_operator
        found["paused"] = paused(self._snapshot) if is_operator else []
        if self._error:
            found["alerts"] = [{"key": "endpoint", "level": "bad", "lines": [_FAILED]}]
        return encode(found).encode()

    async def _act(self, request: Request) -> Response:
        if self._operator is None or not self._may_act(request):
            raise HTTPException(403, "Only the operator's page may do this.")
        if request.method != "POST":
            raise HTTPException(405, "Actions are posted.")
        async with self._reading:
            await self._read()
        try:
            order = await request.json()
            message = await run_in_threadpool(self._operator.act, self._snapshot, order)
        except EaasError as error:
            message = str(error)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return JSONResponse({"message": message})

    def _may_act(self, request: Request) -> bool:
        if self._operator is None or not viewers.is_local(request.url.hostname):
            return False
        return self._token is None or self._token.is_operator(request.cookies)

    async def _read(self) -> None:
        """Read the cluster, unless the last snapshot is fresh. On failure keep that."""
        now = time.monotonic()
        if now - self._read_at < 0.9 * self._page["period_s"]:
            return
        self._read_at, error = now, ""
        loop = asyncio.get_running_loop()
        try:
            self._snapshot = await loop.run_in_executor(self._thread, self._look)
        except Exception as failure:  # noqa: BLE001 (logged and shown)
            error = repr(failure)
            # Log an error once, not once a second.
            if error != self._error:
                _log.error("the dashboard cannot read the cluster", exc_info=failure)
        self._error = error
        self._documents.clear()

    def _look(self) -> ClusterSnapshot:
        if self._reader is None:
            self._reader = self._open_reader()
        return self._reader.look()

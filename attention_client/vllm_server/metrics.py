"""/metrics of vLLM's API server: vLLM's own page, and the client metrics of its workers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from attention_client.engines.vllm.worker_page import merge, read_page
from attention_client.vllm_server.in_process import call
from eaas.control_plane.observer import ClusterObserver

__all__ = ["metrics_page"]

_ASK_S = 0.5
_PAGE_S = 1.0


async def metrics_page(
    app: ASGIApp, scope: Scope, observer: ClusterObserver, address: str
) -> Response:
    """Make the page of both. Without a monitor, the workers are unknown and the page is vLLM's.

    Args:
        app: vLLM's application.
        scope: The request.
        observer: Knows the members.
        address: host:port of this endpoint, by which its workers are members.
    """
    status, page = 200, b""
    # Without the request's headers, the answer is neither compressed nor in OpenMetrics' format.
    async with aclosing(call(app, scope, "GET", "/metrics")) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                status = message["status"]
            page += message.get("body", b"")
    text = await asyncio.get_running_loop().run_in_executor(None, _of_workers, observer, address)
    return Response(page + text.encode(), status, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _of_workers(observer: ClusterObserver, address: str) -> str:
    found = observer.clients(address, _ASK_S)
    return merge((m.id, read_page(m.pid, _PAGE_S)) for m in found)

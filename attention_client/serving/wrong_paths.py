"""What a client should do that asked for a URL which the endpoint does not have."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.routing import Match

__all__ = ["remedy"]

# OpenAI's and vLLM's paths for what this endpoint does not do.
_OTHER_WORK = re.compile(
    r"/(embeddings|(re)?rank|score|classify|pooling|moderations|audio|images|videos|files|uploads|batches|"
    r"fine_tuning|assistants|threads|realtime)(/|$)"
)
_MOST_SEGMENTS = 8  # before what may be a path of ours


def remedy(request: Request) -> str:
    """Return the advice for a request whose path matches no route, one sentence or two."""
    base = f"{request.base_url}v1"
    parts = request.url.path.strip("/").split("/")
    azure = " (OpenAI's client, not Azure's)" if parts[:2] == ["openai", "deployments"] else ""
    for first in range(min(len(parts), _MOST_SEGMENTS)):
        path = "/v1/" + "/".join(parts[first:])
        scope = {**request.scope, "path": path}
        if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f"Use {path}: set the client's base URL to {base}{azure}."
    if _OTHER_WORK.search(request.url.path):
        return "This server generates text and nothing else: use another server for this."
    if parts[0] == "api":
        return f"Ollama's API is not served: choose the client's OpenAI provider, with base URL {base}."
    return f"The API begins at {base}; {request.base_url}openapi.json lists all paths."

"""The HTTP face of an attention client: OpenAI's API over any transformers causal model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_client.serve.app import build_app
    from attention_client.serve.hosts import LoopbackHosts
    from attention_client.serve.limits import ServeLimits
    from attention_client.serve.live_admission import Scheduling
    from attention_client.serve.server import HttpServer, bind

__all__ = ["HttpServer", "LoopbackHosts", "Scheduling", "ServeLimits", "bind", "build_app"]

_MODULES = {
    "HttpServer": "server",
    "LoopbackHosts": "hosts",
    "Scheduling": "live_admission",
    "ServeLimits": "limits",
    "bind": "server",
    "build_app": "app",
}


def __getattr__(name: str) -> Any:
    # Most need torch, whose import takes seconds; the prompt worker, a process of its own, does without.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

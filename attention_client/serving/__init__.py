"""The HTTP endpoint of an attention client: OpenAI's API over any transformers causal model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_client.serving.app import build_app
    from attention_client.serving.generation.live_admission import Scheduling
    from attention_client.serving.hosts import LoopbackHosts
    from attention_client.serving.limits import ServeLimits
    from attention_client.serving.network.server import HttpServer, bind

__all__ = ["HttpServer", "LoopbackHosts", "Scheduling", "ServeLimits", "bind", "build_app"]

_MODULES = {
    "HttpServer": "network.server",
    "LoopbackHosts": "hosts",
    "Scheduling": "generation.live_admission",
    "ServeLimits": "limits",
    "bind": "network.server",
    "build_app": "app",
}


def __getattr__(name: str) -> Any:
    # Most of these import torch, which takes seconds. The prompt worker process must not pay for that.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

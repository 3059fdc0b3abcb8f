"""The HTTP face of an attention client: OpenAI's API over any transformers causal model."""

from attention_client.serve.app import build_app
from attention_client.serve.limits import ServeLimits
from attention_client.serve.live_admission import Scheduling
from attention_client.serve.server import HttpServer, bind

__all__ = ["HttpServer", "Scheduling", "ServeLimits", "bind", "build_app"]

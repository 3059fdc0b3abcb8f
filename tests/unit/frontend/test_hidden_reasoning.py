"""Reasoning that a request does not want is not delivered, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from byte_tokenizer import byte_tokenizer
from eaas.generation.sampling import GREEDY
from eaas.generation.work import Delivery, Work
from frontend.defaults import Defaults
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.metrics import ServeMetrics
from frontend.requests.completions import ChatHandler, Handler
from frontend.requests.messages import MessagesHandler

TOKENIZER = byte_tokenizer("<|im_end|>", eos_token="<|im_end|>")


class Service(SimpleNamespace):
    """A model that answers each request with a thought and a word."""

    tokenizer, token_texts, grammars = TOKENIZER, None, None
    name, max_sequences, max_model_len = "tiny", 1, 99
    defaults = Defaults(GREEDY, None, (256,), ())

    def __init__(self) -> None:
        self.engine = SimpleNamespace(submit=self.submit, cancel=lambda _: None)
        self.metrics = ServeMetrics(CollectorRegistry())

    def markup(self, **_: Any) -> Markup:
        return Markup(Family.of(TOKENIZER, "hermes"), TOKENIZER)

    def check_engine(self) -> None:
        pass

    async def read(self, cls: Any, body: bytes) -> Any:
        return cls.read(json.loads(body)), [[1]]

    def submit(self, _work: Work, deliver: Callable[[Delivery], None]) -> None:
        tokens = TOKENIZER("<think>Hm.</think>Paris")["input_ids"]
        deliver(Delivery([*tokens, 256], finished=True))


def ask(cls: type[Handler], **fields: Any) -> str:
    async def answered() -> str:
        messages = [{"role": "user", "content": "a"}]
        body = {"max_tokens": 90, "messages": messages, **fields}
        service: Any = Service()
        response = await cls(service).handle_request(json.dumps(body).encode(), lambda _: None)
        if not fields.get("stream"):
            return bytes(response.body).decode()
        return "".join([str(part) async for part in response.body_iterator])  # type: ignore[attr-defined]

    return asyncio.run(answered())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cls", "hides"),
    [
        (ChatHandler, {"include_reasoning": False}),
        (MessagesHandler, {"thinking": {"type": "disabled"}}),
        (MessagesHandler, {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ],
)
def test_reasoning_is_not_delivered(cls: type[Handler], hides: Any, stream: bool) -> None:
    assert "Hm." in ask(cls, stream=stream)
    hidden = ask(cls, stream=stream, **hides)
    assert "Hm." not in hidden
    assert "Paris" in hidden
    assert ('"finish_reason":"stop"' if cls is ChatHandler else '"end_turn"') in hidden

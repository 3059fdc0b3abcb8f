"""Prompts that chat templates make of messages, and messages of clients."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from byte_tokenizer import byte_tokenizer
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.reader import ModelLimits, PromptReader

__all__ = ["TEMPLATES", "assistant", "call", "prompt", "result", "template"]

_DIRECTORY = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in _DIRECTORY.glob("*.jinja"))
"""The published templates' demands, in small form: what they show and refuse; `fields` shows all."""


def template(name: str) -> str:
    """Return the text of a template."""
    return (_DIRECTORY / f"{name}.jinja").read_text()


@cache
def _tokenizer(name: str) -> Any:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = byte_tokenizer(*names.values(), **names)
    tokenizer.chat_template = template(name) if name in TEMPLATES else name
    return tokenizer


@cache
def _reader(name: str) -> PromptReader:
    return PromptReader(_tokenizer(name), ModelLimits(10**6, 258))


def prompt(name: str, *messages: Any, cls: Any = ChatRequest, **fields: Any) -> str:
    """Return the text that a template, by name or itself, makes of messages. Raises ApiError."""
    body = json.dumps({"messages": messages, **fields}).encode()
    _, (tokens,) = _reader(name).read(cls, body)
    return str(_tokenizer(name).decode(tokens))


def assistant(*calls: Any, content: Any = None, **fields: Any) -> dict[str, Any]:
    """Return an answer that a client sends back."""
    message = {"role": "assistant", "content": content, **fields}
    return message | ({"tool_calls": [*calls]} if calls else {})


def call(name: str, arguments: Any, id: str | None = "call_0123456789") -> dict[str, Any]:
    """Return a tool call of an answer."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, id: str | None = "call_0123456789", **fields: Any) -> dict[str, Any]:
    """Return the message with a call's result."""
    return {"role": "tool", "tool_call_id": id, "content": content, **fields}

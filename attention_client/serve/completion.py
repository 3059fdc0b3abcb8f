"""/v1/completions."""

from __future__ import annotations

from typing import Any

from attention_client.serve.generation import Finish
from attention_client.serve.handler import Handler, usage_of
from attention_client.serve.requests import CompletionRequest
from attention_client.serve.service import Service

__all__ = ["TextHandler"]


class TextHandler(Handler):
    """/v1/completions."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    default_tokens = 16  # OpenAI's

    def __init__(self, service: Service) -> None:
        self._service = service

    def parser(self, request: CompletionRequest, prompt: list[int]) -> None:
        """Plain text has no parts."""

    def opening(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def choice(self, request_id: str, piece: Any) -> dict[str, Any]:
        """The text of a piece."""
        ended = isinstance(piece, Finish)
        return {
            "index": 0,
            "text": "" if ended else piece,
            "logprobs": None,
            "finish_reason": piece.reason if ended else None,
        }

    def answer(self, request_id: str, pieces: list[Any], finish: Finish) -> dict[str, Any]:
        """The text completion."""
        choice = {
            "index": 0,
            "text": "".join(pieces),
            "finish_reason": finish.reason,
            "logprobs": None,
        }
        return {
            "id": request_id,
            "object": "text_completion",
            "created": self._service.clock(),
            "model": self._service.name,
            "choices": [choice],
            "usage": usage_of(finish).model_dump(exclude_none=True),
        }

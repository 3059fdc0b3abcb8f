"""/v1/completions."""

from __future__ import annotations

from typing import Any

from attention_client.serving.prompts.bodies import CompletionRequest
from attention_client.serving.requests.generation import Finish
from attention_client.serving.requests.handler import Handler, usage_of

__all__ = ["TextHandler"]


class TextHandler(Handler):
    """/v1/completions."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    default_tokens = 16  # OpenAI's

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

"""Handler of /v1/completions in the attention client: pieces of an answer to plain text."""

from __future__ import annotations

from typing import Any

from attention_client.serving.prompts.bodies import CompletionRequest
from attention_client.serving.requests.generation import Finish
from attention_client.serving.requests.handler import Handler

__all__ = ["TextHandler"]


class TextHandler(Handler):
    """Handler of /v1/completions: answers as plain text."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    answer_object = chunk_object = "text_completion"
    default_tokens = 16  # OpenAI's

    def chunk(self, request_id: str, piece: Any) -> dict[str, Any]:
        """Convert a piece of the answer, or its Finish, to the choice of a stream's event."""
        ended = isinstance(piece, Finish)
        return {
            "index": 0,
            "text": "" if ended else piece,
            "logprobs": None,
            "finish_reason": piece.reason if ended else None,
        }

    def whole(self, request_id: str, pieces: list[Any]) -> dict[str, Any]:
        """Join all pieces to the text of an answer that is not streamed."""
        return {"text": "".join(pieces), "logprobs": None}

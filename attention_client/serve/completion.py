"""/v1/completions, on transformers' handler (its chunk builder)."""

from __future__ import annotations

from typing import Any

from openai.types import Completion, CompletionUsage
from transformers.cli.serving.completion import CompletionHandler

from attention_client.serve.generation import Finish
from attention_client.serve.handler import Handler, usage_of
from attention_client.serve.requests import CompletionRequest
from attention_client.serve.service import Service

__all__ = ["TextHandler"]


class TextHandler(Handler, CompletionHandler):  # type: ignore[misc]
    """/v1/completions."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    default_tokens = 16  # OpenAI's

    def __init__(self, service: Service) -> None:
        self._service = service

    def prompt_tokens(self, request: CompletionRequest) -> list[int]:
        """The prompt, tokenized if it is not yet. Raises ApiError."""
        if isinstance(request.prompt, str):
            return self._service.encode(request.prompt, "prompt", add_special_tokens=True)
        return self._service.check_tokens(request.prompt, "prompt")

    def parser(self, request: CompletionRequest, prompt: list[int]) -> None:
        """Plain text has no parts."""

    def opening(self, request_id: str, usage: CompletionUsage | None) -> list[str]:
        """Nothing."""
        return []

    def event(self, request_id: str, piece: Any, usage: CompletionUsage | None) -> str:
        """The chunk of a piece."""
        content = {"finish_reason": piece.reason} if isinstance(piece, Finish) else {"text": piece}
        return str(self._build_chunk_sse(request_id, self._service.name, **content, usage=usage))

    def usage_event(self, request_id: str, usage: CompletionUsage) -> str:
        """OpenAI's last chunk."""
        chunk = Completion(
            id=request_id,
            choices=[],
            created=self._service.clock(),
            model=self._service.name,
            object="text_completion",
            usage=usage,
        )
        return self.chunk_to_sse(chunk)

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

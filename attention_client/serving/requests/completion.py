"""Handler of /v1/completions in the attention client: pieces of an answer to plain text."""

from __future__ import annotations

from typing import Any

from attention_client.serving.families.pieces import Finish
from attention_client.serving.prompts.bodies import CompletionRequest
from attention_client.serving.requests.handler import Handler
from attention_client.serving.requests.logprobs import CompletionLogprobs, LogprobsForm
from attention_client.serving.requests.token_texts import TokenTexts

__all__ = ["TextHandler"]


class TextHandler(Handler):
    """Handler of /v1/completions: answers as plain text."""

    request_class = CompletionRequest
    id_prefix = "cmpl"
    answer_object = chunk_object = "text_completion"
    prompt_by_choice = True

    def default_tokens(self, request: CompletionRequest) -> int:
        """Return OpenAI's default, 16, or the model's if it is less."""
        return min(self._service.defaults.max_tokens or 16, 16)

    def logprobs_form(self, request: CompletionRequest, texts: TokenTexts) -> LogprobsForm:
        """Return a new converter of one choice's log-probabilities."""
        return CompletionLogprobs(texts, skips_special=request.skips_special)

    def chunk(self, piece: Any) -> dict[str, Any]:
        """Convert a piece of a choice, or its Finish, to the content of the choice in a stream's event."""
        return {"text": "" if isinstance(piece, Finish) else piece}

    def whole(self, pieces: list[Any]) -> dict[str, Any]:
        """Join all pieces to the text of a choice that is not streamed."""
        return {"text": "".join(pieces)}

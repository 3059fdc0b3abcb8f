"""The JSON bodies of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from attention_client.serving.api_error import ApiError
from attention_client.serving.prompts.bodies import TemplateFields
from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.messages import Message

__all__ = ["DetokenizeRequest", "TokenizeRequest"]

_MOST_CHARACTERS = 4 * 2**20  # a token may be hundreds of characters


class TokenizeRequest(Body, TemplateFields):
    """Body of /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """Whether to add the tokenizer's special tokens, which a chat template has already added."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(Body):
    """Body of /detokenize: token ids."""

    tokens: list[int]

    @property
    def text(self) -> str:
        """The text of the tokens, once it is decoded."""
        return str(self.found["text"])

    def decode(self, tokenizer: Any) -> None:
        """Set the text of the tokens, special ones too. Raises ApiError (400) if it is too long."""
        text = str(tokenizer.decode(self.tokens))
        if len(text) > _MOST_CHARACTERS:
            raise ApiError.invalid(
                "tokens",
                f"'tokens': the text has {len(text)} characters; the limit is {_MOST_CHARACTERS}.",
            )
        self.found["text"] = text

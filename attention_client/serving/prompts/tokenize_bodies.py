"""The JSON bodies of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from attention_client.serving.prompts.bodies import TemplateFields
from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.messages import Message

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


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

"""Handlers of /tokenize and /detokenize in the attention client, in vLLM's form."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from attention_client.serving.prompts.tokenize_bodies import DetokenizeRequest, TokenizeRequest
from attention_client.serving.requests.ignored import ignored_header, log_ignored
from attention_client.serving.requests.service import Service

__all__ = ["DetokenizeHandler", "TokenizeHandler"]

_AT_ONCE = 8192  # tokens that are written before other requests have their turn


class TokenizeHandler:
    """Answers with the tokens of a text or of chat messages. Their number is not limited."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request (`Handler.handle_request`). Raises ApiError."""
        service = self._service
        request, (found,) = await service.prompts.read(TokenizeRequest, body)
        service.check_name(request.model)
        log_ignored(request.ignored)
        # A list of numbers takes nine times the memory, for as long as the client reads.
        tokens = array("I", found)
        del found
        convert = service.tokenizer.convert_ids_to_tokens if request.return_token_strs else None
        return StreamingResponse(
            _answer(tokens, service.max_model_len, convert),
            media_type="application/json",
            headers=ignored_header(request.ignored),
        )


async def _answer(
    tokens: Sequence[int], max_model_len: int, convert: Any | None
) -> AsyncIterator[str]:
    """Write the JSON of an answer in pieces, so that millions of tokens delay no other request."""
    yield f'{{"count":{len(tokens)},"max_model_len":{max_model_len},"tokens":['
    async for piece in _items(tokens, None):
        yield piece
    yield '],"token_strs":'
    if convert is None:
        yield "null}"
        return
    yield "["
    async for piece in _items(tokens, convert):
        yield piece
    yield "]}"


async def _items(tokens: Sequence[int], convert: Any | None) -> AsyncIterator[str]:
    for begin in range(0, len(tokens), _AT_ONCE):
        items = list(tokens[begin : begin + _AT_ONCE])
        text = json.dumps(items if convert is None else convert(items), separators=(",", ":"))
        yield f"{',' if begin else ''}{text[1:-1]}"
        await asyncio.sleep(0)


class DetokenizeHandler:
    """Answers with the text of tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request (`Handler.handle_request`). Raises ApiError."""
        request, _ = await self._service.prompts.read(DetokenizeRequest, body)
        self._service.check_name(request.model)
        log_ignored(request.ignored)
        return JSONResponse({"prompt": request.text}, headers=ignored_header(request.ignored))

"""Answers of /tokenize and /detokenize, in vLLM's form, and of Anthropic's /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi.responses import JSONResponse, Response

from attention_client.serving.prompts.anthropic_body import CountRequest
from attention_client.serving.prompts.tokenize_bodies import DetokenizeRequest, TokenizeRequest
from attention_client.serving.requests.ignored import ignored_header
from attention_client.serving.requests.service import More, Service

__all__ = ["count_tokens", "detokenize", "tokenize"]

_AT_ONCE = 8192  # tokens that are written before other threads have their turn


async def tokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the tokens of a text or of chat messages, which may be millions. Raises ApiError."""
    request, (tokens,) = await service.read(TokenizeRequest, body)
    convert = service.tokenizer.convert_ids_to_tokens

    def written() -> str:
        texts = f"[{_items(tokens, convert)}]" if request.return_token_strs else "null"
        head = f'"count":{len(tokens)},"max_model_len":{service.max_model_len}'
        return f'{{{head},"tokens":[{_items(tokens, list)}],"token_strs":{texts}}}'

    content = await asyncio.to_thread(written)
    headers = ignored_header(request.ignored)
    return Response(content, headers=headers, media_type="application/json")


def _items(tokens: list[int], convert: Any) -> str:
    """Write the items of a JSON list in parts, because each part holds the interpreter's lock."""
    parts = (
        json.dumps(convert(tokens[begin : begin + _AT_ONCE]))
        for begin in range(0, len(tokens), _AT_ONCE)
    )
    return ",".join(part[1:-1] for part in parts)


async def detokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the text of tokens. Raises ApiError."""
    request, _ = await service.read(DetokenizeRequest, body)
    return JSONResponse({"prompt": request.text}, headers=ignored_header(request.ignored))


async def count_tokens(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the number of tokens of chat messages. Raises ApiError."""
    request, (tokens,) = await service.read(CountRequest, body)
    return JSONResponse({"input_tokens": len(tokens)}, headers=ignored_header(request.ignored))

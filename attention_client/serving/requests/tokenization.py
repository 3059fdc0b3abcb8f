"""Answers of /tokenize and /detokenize, in vLLM's form, and of Anthropic's /v1/messages/count_tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from attention_client.serving.prompts.anthropic_body import CountRequest
from attention_client.serving.prompts.bodies import DetokenizeRequest, TokenizeRequest
from attention_client.serving.requests.service import More, Service

__all__ = ["count_tokens", "detokenize", "tokenize"]

_AT_ONCE = 8192  # tokens that are written in one step; a thread takes the steps


async def tokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the tokens of a text or of chat messages, which may be millions. Raises ApiError."""
    request, (found,) = await service.read(TokenizeRequest, body)
    # A list of numbers takes nine times the memory, for as long as the client reads.
    tokens = array("I", found)
    del found
    texts: Iterable[str] = ["null"]
    if request.return_token_strs:
        texts = chain("[", _items(tokens, service.tokenizer.convert_ids_to_tokens), "]")
    head = f'{{"count":{len(tokens)},"max_model_len":{service.max_model_len},"tokens":['
    content = chain([head], _items(tokens, list), ['],"token_strs":'], texts, "}")
    headers = request.ignored_header
    return StreamingResponse(content, headers=headers, media_type="application/json")


def _items(tokens: Sequence[int], convert: Any) -> Iterator[str]:
    """Yield the items of a JSON list in parts, because each part holds the interpreter's lock."""
    for begin in range(0, len(tokens), _AT_ONCE):
        part = json.dumps(convert(list(tokens[begin : begin + _AT_ONCE])), separators=(",", ":"))
        yield f"{',' if begin else ''}{part[1:-1]}"


async def detokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the text of tokens. Raises ApiError."""
    request, _ = await service.read(DetokenizeRequest, body)
    return JSONResponse({"prompt": request.found["text"]}, headers=request.ignored_header)


async def count_tokens(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the number of tokens of chat messages. Raises ApiError."""
    request, (tokens,) = await service.read(CountRequest, body)
    return JSONResponse({"input_tokens": len(tokens)}, headers=request.ignored_header)

"""Random answers of the models of a family, and their reading as an endpoint does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import AddedToken

from eaas.generation.sampling import GREEDY
from eaas.generation.work import Delivery, Work
from family_answers import markup_texts
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.metrics import ServeMetrics
from frontend.prompts.bodies import ChatRequest
from frontend.requests.completions import ChatHandler
from frontend.requests.generation import Answer, Generation

__all__ = ["PieceTokenizer", "family_pieces", "read"]

_FIRST_LETTERS = 1000


class PieceTokenizer:
    """Added tokens, and a token for any bytes, as far as detokenizers and `Markup` use a tokenizer.

    Args:
        added: Text of the added tokens, and whether each is special.
    """

    chat_template = None

    def __init__(self, added: Mapping[str, bool]) -> None:
        self.added_tokens_decoder = {
            index: AddedToken(text, special=special)
            for index, (text, special) in enumerate(added.items())
        }
        self.ids = {text: index for index, text in enumerate(added)}
        self._bytes: list[bytes] = []
        self._token_of: dict[bytes, int] = {}

    def letters(self, data: bytes) -> int:
        """Return the token of some bytes."""
        if data not in self._token_of:
            self._token_of[data] = _FIRST_LETTERS + len(self._bytes)
            self._bytes.append(data)
        return self._token_of[data]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        parts = []
        for token in tokens:
            if token >= _FIRST_LETTERS:
                parts.append(self._bytes[token - _FIRST_LETTERS])
            elif not (skip_special_tokens and self.added_tokens_decoder[token].special):
                parts.append(self.added_tokens_decoder[token].content.encode())
        return b"".join(parts).decode(errors="replace")


@cache
def family_pieces(name: str, kind: str) -> tuple[PieceTokenizer, Callable[..., Markup]]:
    """Return a tokenizer whose added tokens are all, some or none of a family's markup, and its markup.

    The end token is the first one; the second is special and no markup.
    """
    texts = markup_texts(name)
    some = {"all": texts, "some": dict([*texts.items()][::2]), "none": {}}[kind]
    tokenizer = PieceTokenizer({"<end>": True, "<pad>": True, **some})
    return tokenizer, cache(lambda **options: Markup(Family.named(name), tokenizer, **options))


_METRICS = ServeMetrics(CollectorRegistry())


class _Interleaved:
    """An engine that delivers the tokens of all streams in random order, once the last is queued."""

    def __init__(self, streams: list[list[list[int]]], random: Random) -> None:
        self._streams, self._random = streams, random
        self._listeners: list[Callable[[Delivery], None]] = []

    def submit(self, _work: Work, deliver: Callable[[Delivery], None]) -> None:
        self._listeners.append(deliver)
        if len(self._listeners) < len(self._streams):
            return
        turns = [index for index, each in enumerate(self._streams) for _ in each]
        self._random.shuffle(turns)
        left = [[*each] for each in self._streams]
        for index in turns:
            tokens = left[index].pop(0)
            self._listeners[index](Delivery(tokens, finished=not left[index]))

    def cancel(self, request_id: str) -> None:
        pass


def read(
    tokenizer: PieceTokenizer,
    markup: Callable[..., Markup],
    request: ChatRequest,
    streams: list[list[list[int]]],
    ends: tuple[int, ...],
    random: Random,
) -> list[list[Any]]:
    """Return the pieces of each choice of a request.

    Args:
        tokenizer, markup: Of the model (`family_pieces`).
        request: The request, with its opening.
        streams: For each choice the tokens of each delivery.
        ends: The end tokens.
        random: Draws the order of the deliveries.
    """
    engine = _Interleaved(streams, random)
    service: Any = SimpleNamespace(
        markup=markup, engine=engine, tokenizer=tokenizer, metrics=_METRICS
    )
    form = ChatHandler(service).form(request)
    works = [Work(str(index), [1], 1, 10**6, ends, GREEDY) for index in range(len(streams))]
    choices = [Generation(service, request, form, work) for work in works]
    found: list[list[Any]] = [[] for _ in streams]

    async def run() -> None:
        async for index, piece in Answer("a", choices, 1).pieces():
            found[index].append(piece)

    asyncio.run(run())
    return found

"""The engine for a sequence: where its answer is expected to end first.

The time that a sequence takes on an engine is that of the prompts ahead of it, of the part of its own prompt
that the engine's cache does not have, and of an answer of usual length at the engine's present pace. Which
prefixes an engine's cache has, the frontend knows from what it sent there: caches share whole blocks of
tokens, so it keeps a digest of each block and all before it, up to a number of blocks.

Pure: rates come from what the frontend measures. That of prompts is one for all engines, because an engine
that only had short ones looks slow. The pace is each engine's own, and tells how busy the engine is. So that
of an engine without sequences is out of date: it is taken to be as fast as any.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from eaas.generation.work import Work

__all__ = ["LeastTime"]

# Tokens of a block: those of a cache's page, else fewer prefixes would be found.
_BLOCK = 64
_DIGEST_BYTES = 8
# Of all engines; older ones are forgotten first.
_MOST_BLOCKS = 1 << 16
# Until an engine has been measured.
_FIRST_TOKENS_S, _FIRST_GAP_S = 1000.0, 0.02
# Weight of a new measurement.
_NEW = 0.1
# Tokens of an answer, until some have ended.
_FIRST_LENGTH = 64.0


@dataclass
class _Engine:
    """What is known of one engine.

    Attributes:
        gap_s: Time between two tokens of an answer.
        free_at: When it had computed the last prompt.
        ahead: Tokens that were sent for attempts without a token.
        running: Attempts that it has.
    """

    gap_s: float = _FIRST_GAP_S
    free_at: float = 0.0
    ahead: int = 0
    running: int = 0


@dataclass
class _Attempt:
    """A sequence that an engine has.

    Attributes:
        tokens: Tokens that were sent.
        last: When it was sent, or had its last token.
        answer: Tokens that it delivered.
    """

    engine: _Engine
    tokens: int
    last: float
    answer: int = 0


class LeastTime:
    """Chooses the engine with the least expected time."""

    def __init__(self) -> None:
        self._engines = defaultdict[str, _Engine](_Engine)
        self._attempts: dict[int, _Attempt] = {}
        self._blocks: OrderedDict[bytes, set[str]] = OrderedDict()
        self._length = _FIRST_LENGTH
        # Of the last prompts, and the seconds that they took.
        self._prompt_tokens, self._prompt_s = _FIRST_TOKENS_S, 1.0

    def choose(self, work: Work, engines: Sequence[str]) -> str:
        """Return the one of two engines or more on which the sequence is expected to end first."""
        known = self._known(work.tokens, engines)
        least_gap_s = min(engine.gap_s for engine in map(self._engines.__getitem__, engines))

        def expected(name: str) -> tuple[float, int]:
            engine = self._engines[name]
            tokens = engine.ahead + len(work.tokens) - known[name]
            gap_s = engine.gap_s if engine.running else least_gap_s
            seconds = tokens * self._prompt_s / self._prompt_tokens
            return seconds + self._length * gap_s, engine.running

        return min(engines, key=expected)

    def sent(self, name: str, attempt: int, work: Work, now: float) -> None:
        """Learn that an engine got a sequence, and will have its blocks."""
        engine = self._engines[name]
        self._attempts[attempt] = _Attempt(engine, len(work.tokens), now)
        engine.ahead += len(work.tokens)
        engine.running += 1
        for digest in _digests(work.tokens):
            self._blocks.setdefault(digest, set()).add(name)
            self._blocks.move_to_end(digest)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def delivered(self, attempt: int, tokens: int, now: float) -> None:
        """Learn that an engine delivered tokens of an attempt."""
        found = self._attempts[attempt]
        engine = found.engine
        if found.answer:
            engine.gap_s += _NEW * ((now - found.last) / tokens - engine.gap_s)
        else:
            engine.ahead -= found.tokens
            seconds = now - max(found.last, engine.free_at)
            engine.free_at = now
            self._prompt_tokens += found.tokens - _NEW * self._prompt_tokens
            self._prompt_s += max(seconds, 0.0) - _NEW * self._prompt_s
        found.answer += tokens
        found.last = now

    def ended(self, attempt: int) -> None:
        """Learn that an attempt ended, or left its engine."""
        found = self._attempts.pop(attempt)
        found.engine.running -= 1
        if found.answer:
            self._length += _NEW * (found.answer - self._length)
        else:
            found.engine.ahead -= found.tokens

    def forget(self, name: str) -> None:
        """Forget an engine that was lost, and its cache with it."""
        self._engines.pop(name, None)
        for owners in self._blocks.values():
            owners.discard(name)

    def _known(self, tokens: Sequence[int], engines: Sequence[str]) -> dict[str, int]:
        """Return the tokens at the beginning that each engine's cache has."""
        known = dict.fromkeys(engines, 0)
        holders = set(engines)
        for number, digest in enumerate(_digests(tokens), 1):
            holders &= self._blocks.get(digest, set())
            if not holders:
                break
            known.update(dict.fromkeys(holders, number * _BLOCK))
        return known


def _digests(tokens: Sequence[int]) -> list[bytes]:
    """Return a digest of each whole block of tokens and all tokens before it."""
    data, digests, last = np.asarray(tokens, np.uint32), [], b""
    for end in range(_BLOCK, len(data) + 1, _BLOCK):
        block = data[end - _BLOCK : end].tobytes()
        last = blake2b(block, digest_size=_DIGEST_BYTES, key=last).digest()
        digests.append(last)
    return digests

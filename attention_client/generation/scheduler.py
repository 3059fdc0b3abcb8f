"""Which tokens the next forward pass computes: continuous batching (Orca), chunked prefill (Sarathi-Serve).

Pure: no clock, no tensors, no model. Sequences come in by `add`, each `step` says what a pass computes, and
`advance` takes its tokens.

    add -> waiting --(a strategy chooses, blocks are free)--> prefill -> decode -> remove
              ^                                                  |          |
              +-------------- evicted: no block is free ---------+----------+

A pass has one token of each sequence that decodes, and then as many tokens of prompts as there is room for.
A sequence that waits gets all blocks of its tokens when it is admitted, so prefill never runs out of them. If
a sequence that decodes needs a block and none is free, the one admitted last goes back to wait, ahead of all
others, with the tokens that it has; then none is admitted until one ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from attention_client.generation.blocks import BlockPools
from attention_client.generation.prefill_target import PrefillTarget
from eaas.generation.work import Work

__all__ = ["Admitting", "Part", "Scheduler", "Sequence"]


@dataclass(eq=False)
class Sequence:
    """A request's sequence in the engine.

    Attributes:
        work: The request.
        tokens: Prompt and answer so far.
        computed: Its first tokens whose keys and values are in the cache.
        prefill: Tokens that it had when it was admitted last; it decodes once these are computed.
        scored: Tokens of the prompt that have scores.
        digests: Of its blocks, while it waits; None: not computed yet.
        chooser: What the sampler keeps with the sequence.
    """

    work: Work
    tokens: list[int] = field(init=False)
    computed: int = 0
    prefill: int = 0
    scored: int = 1
    digests: list[bytes] | None = None
    chooser: Any = None

    def __post_init__(self) -> None:
        self.tokens = list(self.work.tokens)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.work.id

    @property
    def answer(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.work.prompt_length

    @property
    def decodes(self) -> bool:
        """Whether its prompt is computed, so that a pass has one token of it."""
        return self.computed >= self.prefill

    @property
    def is_finished(self) -> bool:
        """Whether the last token, of the answer, ends it."""
        return self.answer >= self.work.max_tokens or (
            self.answer > 0 and self.tokens[-1] in self.work.end_tokens
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of its prompt have no scores yet, and the request asks for them."""
        return self.work.sampling.prompt_logprobs and self.scored < self.work.prompt_length


class Part(NamedTuple):
    """The tokens of one sequence in a pass.

    Attributes:
        sequence: The sequence.
        begin: Position of the first one.
        end: Position after the last one.
        samples: Whether the pass gives the sequence a new token.
    """

    sequence: Sequence
    begin: int
    end: int
    samples: bool

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    @property
    def is_prefill(self) -> bool:
        """Whether its tokens were known when the sequence was admitted."""
        return self.begin < self.sequence.prefill


class Admitting(Protocol):
    """Chooses which waiting sequences run next; see `LiveAdmission`."""

    def arrive(self, request: str, tokens: list[int], running: int) -> None:
        """Add a request that waits."""

    def put_back(self, request: str) -> None:
        """Let an evicted request wait ahead of all others."""

    def candidates(self, running: list[Sequence]) -> list[str]:
        """Return the requests that may join the running ones, in order."""

    def admit(self, requests: Iterable[str]) -> None:
        """Mark requests as running."""

    def leave(self, request: str) -> None:
        """Forget a request."""


class Scheduler:
    """Chooses the parts of each pass.

    Args:
        pools: The blocks of the cache.
        admission: Chooses among the waiting sequences.
        max_tokens: Most tokens of a pass; more if more sequences than that decode.
        target: Limits the prompts' tokens of a pass beside answers.
        longest_shared: Sequences of more tokens share no blocks; None: no limit.

    Attributes:
        running: Sequences with blocks, by id, in the order of their admission.
        waiting: The others.
    """

    def __init__(
        self,
        pools: BlockPools,
        admission: Admitting,
        max_tokens: int,
        target: PrefillTarget,
        longest_shared: int | None = None,
    ) -> None:
        self._pools = pools
        self._admission = admission
        self._max_tokens = max_tokens
        self._target = target
        self._longest_shared = longest_shared
        self._admits = True
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting[sequence.id] = sequence
        self._admission.arrive(sequence.id, sequence.work.prompt, len(self.running))

    def remove(self, name: str) -> None:
        """Remove a sequence that ended, failed or was cancelled; no effect on an unknown one."""
        if self.running.pop(name, None) is not None:
            self._pools.release(name)
            self._admits = True
        elif self.waiting.pop(name, None) is None:
            return
        self._admission.leave(name)

    def step(self) -> list[Part]:
        """Return the parts of the next pass, of answers first; empty: there is nothing to compute."""
        answers = self._answers()
        prompts = len(self.running) - len(answers) + len(self.waiting)
        room = self._max_tokens - len(answers)
        limit = self._target.limit(len(answers), prompts)
        if limit is not None:
            room = min(room, limit)
        parts = [_part(sequence, 1) for sequence in answers]
        for sequence in self.running.values():
            if room > 0 and not sequence.decodes:
                parts.append(_part(sequence, room))
                room -= parts[-1].size
        return parts + self._admitted(room)

    def advance(self, parts: list[Part], tokens: Iterable[int | None]) -> None:
        """Take a pass's new tokens, one for each part; None: no token, or its sequence is removed next."""
        for (sequence, _, end, _), token in zip(parts, tokens, strict=True):
            sequence.computed = end
            if self._may_share(sequence):
                self._pools.computed(sequence.id, sequence.tokens, end)
            if token is not None:
                sequence.tokens.append(token)

    def _answers(self) -> list[Sequence]:
        """Return the sequences that decode; evict the last ones if there are not enough blocks for all."""
        for sequence in list(self.running.values()):
            while sequence.id in self.running and sequence.decodes:
                if self._pools.extend(sequence.id, len(sequence.tokens)):
                    break
                self._evict(next(reversed(self.running.values())))
        return [sequence for sequence in self.running.values() if sequence.decodes]

    def _evict(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self._pools.release(sequence.id)
        sequence.computed = 0
        self.waiting[sequence.id] = sequence
        self._admission.put_back(sequence.id)
        self._admits = False

    def _admitted(self, room: int) -> list[Part]:
        """Admit waiting sequences while there is room for their tokens and blocks; return their parts."""
        parts: list[Part] = []
        if room <= 0 or not self.waiting or (self.running and not self._admits):
            return parts
        for name in self._admission.candidates(list(self.running.values())):
            sequence = self.waiting[name]
            if sequence.digests is None:
                may_share = self._may_share(sequence) and not sequence.scores_prompt
                sequence.digests = self._pools.digests(sequence.tokens) if may_share else []
            # A block for each sequence that runs, so that it is not evicted at once.
            spare = len(self.running)
            known = self._pools.admit(name, sequence.tokens, spare, sequence.digests)
            if known is None:
                continue
            del self.waiting[name]
            self.running[name] = sequence
            sequence.digests = None
            sequence.computed, sequence.prefill = known, len(sequence.tokens)
            parts.append(_part(sequence, room))
            room -= parts[-1].size
            if room <= 0:
                break
        self._admission.admit([part.sequence.id for part in parts])
        return parts

    def _may_share(self, sequence: Sequence) -> bool:
        return self._longest_shared is None or len(sequence.tokens) <= self._longest_shared


def _part(sequence: Sequence, room: int) -> Part:
    end = min(len(sequence.tokens), sequence.computed + room)
    return Part(sequence, sequence.computed, end, end == len(sequence.tokens))

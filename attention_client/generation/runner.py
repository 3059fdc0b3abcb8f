"""Runs the passes that the scheduler chose: the model, the scores of prompts, the choice of tokens.

Shapes: T tokens of a pass, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from attention_client.engines.transformers.paged.sequences import Sequences
from attention_client.engines.transformers.rotary import of_prompts
from attention_client.generation.blocks import BlockPools
from attention_client.generation.sampling import Chooser, Row, choose_tokens
from attention_client.generation.scheduler import Part
from attention_client.generation.scores import score
from attention_client.layer_call.expert_attribution import ExpertAttribution
from eaas.generation.errors import ApiError
from eaas.generation.scores import Scores
from eaas.generation.work import NOBODY

__all__ = ["Outcome", "Runner"]


@dataclass
class Outcome:
    """What a pass has for one of its parts.

    Attributes:
        token: The sequence's next token; None: its prompt is not computed yet, or it failed.
        scores: Log-probabilities of the token; None: nobody asked.
        prompt_scores: Those of tokens of the prompt.
        servers: (token, expert) pairs of the token by server.
        error: Why no token may follow.
    """

    token: int | None = None
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    servers: Mapping[str, int] = field(default_factory=lambda: NOBODY)
    error: ApiError | None = None


class _Model(Protocol):
    def run(
        self, tokens_T: torch.Tensor, rows_R: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """See `PagedModel.run`."""


class Runner:
    """Computes a pass and chooses its tokens.

    Args:
        model: A `PagedModel`.
        pools: The blocks of the sequences.
        attribution: Records which servers compute a token's experts.
        needs_prompts: Whether rotary frequencies depend on the length of prompts (`rotary.py`).
    """

    def __init__(
        self, model: _Model, pools: BlockPools, attribution: ExpertAttribution, needs_prompts: bool
    ) -> None:
        self._model = model
        self._pools = pools
        self._attribution = attribution
        self._needs_prompts = needs_prompts

    @torch.no_grad()
    def run(self, parts: list[Part]) -> list[Outcome]:
        """Compute the parts of a pass; return what each one has.

        Raises:
            EaasError: A layer's experts cannot be computed.
        """
        sequences = Sequences.of(
            [part.size for part in parts],
            [part.begin for part in parts],
            [self._pools.tables(part.sequence.id) for part in parts],
        )
        begins = sequences.begins.tolist()
        tokens_T = torch.tensor(
            [token for part in parts for token in part.sequence.tokens[part.begin : part.end]]
        )
        scored = [_scored_rows(part, begin) for part, begin in zip(parts, begins[:-1], strict=True)]
        rows = [row for found in scored for row in found]
        first = len(rows)
        sampling = [place for place, part in enumerate(parts) if part.samples]
        rows += [begins[place + 1] - 1 for place in sampling]
        outcomes = [Outcome() for _ in parts]
        with self._watching_servers(parts, outcomes, begins), self._with_prompts(parts):
            # A compiled pass has at least one row.
            logits_RV = self._model.run(tokens_T, torch.tensor(rows or [0]), sequences)
        self._score_prompts(logits_RV[:first], parts, scored, begins, outcomes)
        self._choose(logits_RV[first : len(rows)], parts, sampling, outcomes)
        return outcomes

    @contextmanager
    def _watching_servers(
        self, parts: list[Part], outcomes: list[Outcome], begins: list[int]
    ) -> Iterator[None]:
        asking = [part.samples and part.sequence.work.servers for part in parts]
        with self._attribution.watching(any(asking)) as seen:
            yield
        if seen is not None:
            for place, asks in enumerate(asking):
                if asks:
                    # The next token is chosen by the sequence's last token of the pass.
                    outcomes[place].servers = seen.of(begins[place + 1] - 1)

    def _with_prompts(self, parts: list[Part]) -> AbstractContextManager[None]:
        if not self._needs_prompts:
            return nullcontext()
        lengths = torch.tensor([part.sequence.work.prompt_length for part in parts])
        return of_prompts(lengths.repeat_interleave(torch.tensor([part.size for part in parts])))

    @staticmethod
    def _score_prompts(
        logits_RV: torch.Tensor,
        parts: list[Part],
        scored: list[range],
        begins: list[int],
        outcomes: list[Outcome],
    ) -> None:
        done = 0
        for place, (part, rows) in enumerate(zip(parts, scored, strict=True)):
            if not rows:
                continue
            sequence, shift = part.sequence, part.begin - begins[place]
            # The row of a token scores the token after it.
            after = slice(rows.start + shift + 1, rows.stop + shift + 1)
            tokens_T = torch.tensor(sequence.tokens[after])
            top = sequence.work.sampling.logprobs or 0
            found = score(logits_RV[done : done + len(rows)], tokens_T, top)
            outcomes[place].prompt_scores = found
            sequence.scored = after.stop
            done += len(rows)

    @staticmethod
    def _choose(
        logits_RV: torch.Tensor,
        parts: list[Part],
        sampling: list[int],
        outcomes: list[Outcome],
    ) -> None:
        if not sampling:
            return
        rows: list[Row | None] = []
        for place in sampling:
            try:
                rows.append(_row(parts[place]))
            except ApiError as error:
                outcomes[place].error = error
                rows.append(None)
        for place, (token, scores) in zip(sampling, choose_tokens(logits_RV, rows), strict=True):
            if outcomes[place].error is None:
                outcomes[place].token, outcomes[place].scores = token, scores


def _scored_rows(part: Part, first: int) -> range:
    """Return the rows of a pass that score tokens of the part's prompt; `first` is its first row."""
    sequence = part.sequence
    if not sequence.scores_prompt:
        return range(0)
    low = max(part.begin, sequence.scored - 1)
    high = min(part.end, sequence.work.prompt_length - 1)
    return range(first + low - part.begin, first + max(low, high) - part.begin)


def _row(part: Part) -> Row | None:
    """Return how the next token of a sequence is chosen; None: the likeliest one."""
    sequence = part.sequence
    if sequence.work.sampling.is_plain:
        return None
    if sequence.chooser is None:
        sequence.chooser = Chooser(sequence.work)
    row: Row = sequence.chooser.row(sequence.tokens)
    return row

"""Choice of the next tokens, after the attention client's forward pass, by each request's own settings.

A draw is decided by the request's seed and the position: the same seed and logits give the same tokens,
whatever else is in the batch.

Shapes: R rows, one for each sequence with a new token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor

from attention_client.generation.draws import Draw, draw, key
from attention_client.generation.guide import Guide, restrict
from attention_client.generation.penalties import MOST_SCORE, History, penalize
from attention_client.generation.scores import score
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores
from eaas.generation.work import Work

__all__ = ["Chooser", "Chosen", "Row", "SequenceSampler", "choose", "choose_tokens"]


class Row(NamedTuple):
    """A row that needs more than its argmax.

    Attributes:
        sampling: The settings of its request.
        length: Tokens before the new one, prompt included.
        history: These tokens, if the settings have penalties.
        allowed: Which tokens may follow, bool (V,) or of another length; None: all.
        banned: Tokens that may not follow, but for a row that has no other.
    """

    sampling: Sampling
    length: int
    history: History | None = None
    allowed: npt.NDArray[np.bool_] | None = None
    banned: Sequence[int] = ()


def choose(scores_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Choose each row's next token; return them, int64 (R,).

    A token that a grammar or `banned` forbids is never chosen while the row has another one.

    Args:
        scores_RV: float32 (R, V), the rows' logits, overwritten.
        rows: The rows.
    """
    # From here on -inf means banned: whatever a model computes, another token is above.
    scores_RV.nan_to_num_(nan=-MOST_SCORE).clamp_(-MOST_SCORE, MOST_SCORE)
    for index, row in enumerate(rows):
        if row.allowed is not None:
            restrict(scores_RV[index], row.allowed)
    bias = [
        (r, token, value) for r, row in enumerate(rows) for token, value in row.sampling.logit_bias
    ]
    if bias:
        r, token, value = zip(*bias, strict=True)
        scores_RV[list(r), list(token)] += torch.tensor(value, device=scores_RV.device)
    banned = [(r, token) for r, row in enumerate(rows) for token in row.banned]
    if banned:
        r, token = zip(*banned, strict=True)
        scores_RV[list(r), list(token)] = -torch.inf
    penalized = [(r, row.sampling, row.history) for r, row in enumerate(rows) if row.history]
    if penalized:
        penalize(scores_RV, *zip(*penalized, strict=True))
    drawn = [r for r, row in enumerate(rows) if row.sampling.temperature > 0]
    if not drawn:
        return scores_RV.argmax(dim=-1)  # the first index among equals
    draws = [_draw_of(rows[r]) for r in drawn]
    if len(drawn) == len(rows):
        return draw(scores_RV, draws)
    chosen_R = scores_RV.argmax(dim=-1)
    chosen_R[drawn] = draw(scores_RV[drawn], draws)
    return chosen_R


class Chooser:
    """What the choice of a sequence's tokens keeps between them: its position in a grammar, its history.

    It follows the sequence's tokens, not the number of calls. So it holds for a sequence that is evicted and
    computed again, or that begins with a part of its answer.

    Args:
        work: The request.
    """

    def __init__(self, work: Work) -> None:
        self._sampling = sampling = work.sampling
        self._prompt_length = work.prompt_length
        self._ends_not_before = work.prompt_length + sampling.min_tokens
        self._guide: Guide | None = None
        if sampling.grammar is not None:
            # It applies `min_tokens` itself, because it must not ban the end of a complete answer.
            self._guide = Guide(
                sampling.grammar,
                work.prompt_length,
                self._ends_not_before if sampling.min_tokens else 0,
                sampling.end_tokens,
            )
        self._history = History(work.prompt_length) if sampling.has_penalties else None
        self._longest = max(map(len, sampling.bad_words), default=1)

    def row(self, tokens: list[int]) -> Row:
        """Return the row of the token that follows these, prompt and answer so far.

        Raises:
            ApiError: No token may follow, or the grammar exceeds a limit.
        """
        sampling, history, length = self._sampling, self._history, len(tokens)
        if history is not None:
            history.extend(tokens[history.length :])
        banned = self._ends_of_bad_words(tokens)
        allowed = self._allowed(banned, tokens)
        if length < self._ends_not_before and self._guide is None:
            banned += sampling.end_tokens
        return Row(sampling, length, history, allowed, banned)

    def _ends_of_bad_words(self, tokens: list[int]) -> list[int]:
        if not self._sampling.bad_words:
            return []
        last = tokens[max(self._prompt_length, len(tokens) + 1 - self._longest) :]
        return [
            word[-1]
            for word in self._sampling.bad_words
            if len(word) <= len(last) + 1 and last[len(last) + 1 - len(word) :] == list(word[:-1])
        ]

    def _allowed(self, banned: Sequence[int], tokens: list[int]) -> npt.NDArray[np.bool_] | None:
        sampling, guide = self._sampling, self._guide
        allowed = None if guide is None else guide.allowed(tokens[guide.next :])
        if sampling.allowed_tokens is not None:
            ends = () if guide is None else sampling.end_tokens
            only = np.zeros(max(*sampling.allowed_tokens, *ends, 0) + 1, bool)
            only[[*sampling.allowed_tokens, *ends]] = True
            size = len(only)
            allowed = only if allowed is None else allowed[:size] & only[: len(allowed)]
        if allowed is not None:
            allowed[[token for token in banned if token < len(allowed)]] = False
            if not allowed.any():
                field = "bad_words" if banned else "allowed_token_ids"
                raise ApiError.invalid(field, f"'{field}': it leaves no token that may follow.")
        return allowed


def _draw_of(row: Row) -> Draw:
    sampling = row.sampling
    return Draw(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        key(sampling.seed, row.length),
    )


class Chosen(NamedTuple):
    """A row's token, and its scores if the request reports them."""

    token: int
    scores: Scores | None = None


def choose_tokens(logits_RV: torch.Tensor, rows: Sequence[Row | None]) -> list[Chosen]:
    """Choose the next tokens of a pass.

    Args:
        logits_RV: Logits of any float dtype.
        rows: The rows; None: the argmax, without scores.
    """
    chosen = [Chosen(token) for token in logits_RV.argmax(dim=-1).tolist()]
    special = [index for index, row in enumerate(rows) if row is not None]
    if not special:
        return chosen
    # A copy, in any case: `choose` overwrites it.
    logits_SV = logits_RV[special].float()
    given = [row for row in rows if row is not None]
    reporting = [s for s, row in enumerate(given) if row.sampling.logprobs is not None]
    raw = logits_SV[reporting] if reporting else None
    chosen_S = choose(logits_SV, given)
    for index, token in zip(special, chosen_S.tolist(), strict=True):
        chosen[index] = Chosen(token)
    if raw is not None:
        tops = [given[s].sampling.logprobs or 0 for s in reporting]
        found = score(raw, chosen_S[reporting], max(tops))
        for place, (s, top) in enumerate(zip(reporting, tops, strict=True)):
            index = special[s]
            chosen[index] = Chosen(chosen[index].token, found.rows(place, place + 1, top))
    return chosen


class SequenceSampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of the sequential engine's one request, in ``model.generate`` (`choose`)."""

    def __init__(self, work: Work) -> None:
        self._chooser = None if work.sampling.is_plain else Chooser(work)
        self._scores: Scores | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (1, V) in which only the chosen token is finite. May overwrite them.

        Raises ApiError if no token may follow.
        """
        if self._chooser is None:
            return scores
        row = self._chooser.row(input_ids[0].tolist())
        [(token, self._scores)] = choose_tokens(scores, [row])
        scores[:] = -torch.inf
        scores[0, token] = 0.0
        return scores

    def take_scores(self) -> Scores | None:
        """Return the scores of the last token, if the request reports them."""
        taken, self._scores = self._scores, None
        return taken

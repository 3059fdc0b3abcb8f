"""Choice of the next tokens, after the attention client's forward pass, by each request's own settings.

transformers' continuous batching samples every request of a manager with one configuration. Here the
manager is greedy, and a logits processor leaves a row with settings, or with a grammar, only the token that
these choose. Other rows stay as they are: the manager takes their exact argmax. A draw is decided by the
request's seed and the position: the same seed and logits give the same tokens, whatever else is in the batch.

Shapes: B rows (requests with a new token), R rows with settings or a grammar, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from attention_client.serving.api_error import ApiError
from attention_client.serving.generation.draws import Draw, draw, key
from attention_client.serving.generation.guide import Grammar, Guide, restrict
from attention_client.serving.generation.penalties import MOST_SCORE, History, penalize
from attention_client.serving.generation.scores import Scores, score

__all__ = ["GREEDY", "BatchSampler", "Row", "Sampling", "SequenceSampler", "choose"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request, from its body or the model's defaults.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus sampling: the smallest set of tokens with this probability; 1: all tokens.
        top_k: The k likeliest tokens; 0: all tokens.
        min_p: Tokens with this fraction of the likeliest token's probability; 0: all tokens.
        seed: Seed of the random draws.
        prompt_length: Tokens of the prompt; later ones are generated.
        min_length: Least length of prompt plus answer; no end token is chosen before.
        end_tokens: The tokens that end the answer.
        presence_penalty: Subtracted from the logit of each token that was generated.
        frequency_penalty: Subtracted once for each time that a token was generated.
        repetition_penalty: Divides the positive logit of each token of prompt and answer, and multiplies a
            negative one.
        logit_bias: Tokens, and what is added to their logits.
        logprobs: Report the log-probability of each chosen token and of this many likeliest tokens; None: no
            report.
        prompt_logprobs: Report them for the tokens of the prompt, too.
        grammar: What the answer must follow; None: any text.
        allowed_tokens: The tokens that the answer may have; a grammar may end it in any case. None: all.
        bad_words: Sequences of tokens that the answer must not have.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    prompt_length: int = 0
    min_length: int = 0
    end_tokens: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    allowed_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether each token is the argmax of the logits, and nothing is reported."""
        return (
            self.temperature == 0
            and not self.min_length
            and not self.has_penalties
            and not self.logit_bias
            and self.logprobs is None
            and self.grammar is None
            and self.allowed_tokens is None
            and not self.bad_words
        )

    def guided(self) -> tuple[Sampling, Guide | None]:
        """Return the settings for the sampler, and the guide of a sequence at the start of its answer.

        The guide then applies `min_length`, because it must not ban the end of a complete answer.
        """
        if self.grammar is None:
            return self, None
        guide = Guide(self.grammar, self.prompt_length, self.min_length, self.end_tokens)
        return replace(self, min_length=0, grammar=None), guide


GREEDY = Sampling()


class Row(NamedTuple):
    """A row that needs more than its argmax.

    Attributes:
        place: Its index in the batch.
        sampling: The settings of its request.
        length: Tokens before the new one, prompt included.
        history: These tokens, if the settings have penalties.
        allowed: Which tokens may follow, bool (V,) or of another length; None: all.
        banned: Tokens that may not follow.
    """

    place: int
    sampling: Sampling
    length: int
    history: History | None = None
    allowed: npt.NDArray[np.bool_] | None = None
    banned: Sequence[int] = ()


def choose(scores_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Choose each row's next token; return them, int64 (R,).

    A token that a grammar or `min_length` bans is never chosen while the row has another one.

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
    banned += [
        (r, token)
        for r, row in enumerate(rows)
        if row.length < row.sampling.min_length
        for token in row.sampling.end_tokens
    ]
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


def _limits(
    sampling: Sampling, guide: Guide | None, length: int, tokens_from: Callable[[int], list[int]]
) -> tuple[npt.NDArray[np.bool_] | None, list[int]]:
    """Return which tokens may follow (`Row.allowed`), and those that would complete a bad word.

    Raises ApiError if none may follow.
    """
    longest = max(map(len, sampling.bad_words), default=1)
    last = tokens_from(max(sampling.prompt_length, length + 1 - longest))
    banned = [
        word[-1]
        for word in sampling.bad_words
        if len(word) <= len(last) + 1 and last[len(last) + 1 - len(word) :] == list(word[:-1])
    ]
    allowed = None if guide is None else guide.allowed(tokens_from(guide.next))
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
    return allowed, banned


def _draw_of(row: Row) -> Draw:
    sampling = row.sampling
    return Draw(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        key(sampling.seed, row.length),
    )


def _choose_and_score(
    logits_RV: torch.Tensor, rows: Sequence[Row]
) -> tuple[torch.Tensor, list[Scores | None]]:
    """Choose the rows' tokens; score them for the rows that report. `logits_RV` is overwritten."""
    reporting = [r for r, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = logits_RV[reporting] if reporting else None  # a copy
    chosen_R = choose(logits_RV, rows)
    scores: list[Scores | None] = [None] * len(rows)
    if raw is not None:
        tops = [rows[r].sampling.logprobs or 0 for r in reporting]
        found = score(raw, chosen_R[reporting], max(tops))
        for place, (r, top) in enumerate(zip(reporting, tops, strict=True)):
            scores[r] = found.rows(place, place + 1, top)
    return chosen_R, scores


def _leave_only(scores_BV: torch.Tensor, indices: list[int], chosen_R: torch.Tensor) -> None:
    scores_BV[indices] = -torch.inf
    scores_BV[indices, chosen_R] = 0.0


class BatchSampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of each request in a continuous batch (`choose`).

    A request passes its settings as the keyword "sampling", and its guide, if it follows a grammar, as
    "guide". The history of its tokens stays with the request's own state, so it ends with the request.

    Args:
        fail: Ends a request, given by its id, whose answer cannot go on.
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling, "guide": Guide}  # noqa: RUF012 (the base's form)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, fail: Callable[[str, ApiError], None]) -> None:
        self._fail = fail
        self._rows: list[Row] = []
        self._names: list[str] = []
        self._scores: dict[str, Scores] = {}

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Zero the tensor of settings, which transformers requires and which is not used here."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Store the settings of the next forward pass's rows; return an unused tensor.

        The pass follows at once, because batching is synchronous.
        """
        special = []
        for index, request in enumerate(requests_with_new_token):
            settings = request.state.logit_processor_kwargs
            sampling, guide = settings.get("sampling", GREEDY), settings.get("guide")
            if guide is not None or not sampling.is_plain:
                special.append((index, request.state, sampling, guide))
        self._names = [state.request_id for _, state, _, _ in special]
        self._rows = [self._row(*each) for each in special]
        return torch.zeros(len(requests_with_new_token), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V); in rows with settings only the chosen token is finite. May overwrite them."""
        self._scores = {}
        if self._rows:
            rows, self._rows = self._rows, []
            indices = [row.place for row in rows]
            chosen_R, found = _choose_and_score(scores[indices], rows)
            _leave_only(scores, indices, chosen_R)
            self._scores = {
                name: each
                for name, each in zip(self._names, found, strict=True)
                if each is not None
            }
        return scores

    def take_scores(self) -> Mapping[str, Scores]:
        """Return the scores of the last pass's tokens by request id, for the requests that report."""
        taken, self._scores = self._scores, {}
        return taken

    def _row(self, index: int, state: Any, sampling: Sampling, guide: Guide | None) -> Row:
        # The initial tokens of a request that was evicted to the queue include its answer, so only the sum
        # of both is its length.
        length = len(state.initial_tokens) + len(state.generated_tokens)
        allowed: npt.NDArray[np.bool_] | None = None
        banned: list[int] = []
        try:
            allowed, banned = _limits(sampling, guide, length, partial(_tokens_from, state))
        except ApiError as error:
            self._fail(state.request_id, error)
        history = None
        if sampling.has_penalties:
            settings = state.logit_processor_kwargs
            history = settings.setdefault("history", History(sampling.prompt_length))
            history.extend(_tokens_from(state, history.length))
        return Row(index, sampling, length, history, allowed, banned)


def _tokens_from(state: Any, position: int) -> list[int]:
    """Return a request's tokens from a position on, counted in prompt plus answer."""
    first, second = state.initial_tokens, state.generated_tokens
    if position < len(first):
        return [*first[position:], *second]
    return list(second[position - len(first) :])


class SequenceSampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of the sequential engine's one request, in ``model.generate`` (`choose`)."""

    def __init__(self, sampling: Sampling, guide: Guide | None = None) -> None:
        self._sampling = sampling
        self._guide = guide
        self._history = History(sampling.prompt_length) if sampling.has_penalties else None
        self._scores: Scores | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (1, V) in which only the chosen token is finite. May overwrite them.

        Raises ApiError if no token may follow.
        """
        history, guide = self._history, self._guide
        if self._sampling.is_plain and guide is None:
            return scores
        if history is not None:
            history.extend(input_ids[0, history.length :].tolist())
        length = input_ids.shape[1]
        limits = _limits(self._sampling, guide, length, lambda at: list(input_ids[0, at:].tolist()))
        row = Row(0, self._sampling, length, history, *limits)
        chosen_R, (self._scores,) = _choose_and_score(scores.clone(), [row])
        _leave_only(scores, [0], chosen_R)
        return scores

    def take_scores(self) -> Scores | None:
        """Return the scores of the last token, if the request reports them."""
        taken, self._scores = self._scores, None
        return taken

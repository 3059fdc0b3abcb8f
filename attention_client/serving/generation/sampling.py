"""Choice of the next tokens, after the attention client's forward pass, by each request's own settings.

transformers' continuous batching samples every request of a manager with one configuration. Here the
manager is greedy, and a logits processor leaves each row only the token that the row's own settings choose.
A greedy row is the exact argmax, whatever else is in the batch. A sampled row uses a generator seeded by the
request's seed and the position: the same seed and logits give the same tokens.

Shapes: B rows (requests with a new token), V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.guide import Grammar, Guide, restrict

__all__ = ["GREEDY", "BatchSampler", "Sampling", "SequenceSampler", "choose"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request, from its body or the model's defaults.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus sampling: the smallest set of tokens with this probability; 1: all tokens.
        top_k: The k likeliest tokens; 0: all tokens.
        seed: Seed of the random draws.
        min_length: Least length of prompt plus answer; no end token is chosen before.
        end_tokens: The tokens that end the answer.
        grammar: What the answer must follow; None: any text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_length: int = 0
    end_tokens: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def guided(self, prompt_length: int) -> tuple[Sampling, Guide | None]:
        """Return the settings for the sampler, and the guide of a request at the start of its answer.

        The guide then applies `min_length`, because it must not ban the end of a complete answer.
        """
        if self.grammar is None:
            return self, None
        guide = self.grammar.guide(prompt_length, self.min_length)
        return replace(self, min_length=0, grammar=None), guide


GREEDY = Sampling()


def _draw(scores_V: torch.Tensor, sampling: Sampling, length: int) -> torch.Tensor:
    """Draw one token by the Gumbel-max trick: argmax(score - log(Exponential)) is a draw of softmax."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores_V[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    # Hashed: torch's CPU generator uses only the low 32 bits of its seed.
    digest = hashlib.blake2b(f"{sampling.seed}:{length}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=scores.device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    noise = torch.empty_like(scores).exponential_(generator=generator)
    # A draw of exactly 0 would turn a filtered token into NaN, which argmax prefers.
    gumbel_V = -noise.clamp_min_(torch.finfo(noise.dtype).tiny).log()
    return torch.argmax(scores + gumbel_V)


def choose(scores_BV: torch.Tensor, rows: Sequence[tuple[Sampling, int]]) -> torch.Tensor:
    """Choose each row's next token: return scores in which only it is not -inf, so transformers must take it.

    Args:
        scores_BV: float (B, V). Not changed.
        rows: The settings of each row and its length so far, prompt included.
    """
    early = [b for b, (sampling, length) in enumerate(rows) if length < sampling.min_length]
    if early:
        scores_BV = scores_BV.clone()
        for b in early:
            scores_BV[b, list(rows[b][0].end_tokens)] = -torch.inf
    chosen_B = scores_BV.argmax(dim=-1)  # the first index among equals
    for b, (sampling, length) in enumerate(rows):
        if sampling.temperature > 0:
            chosen_B[b] = _draw(scores_BV[b], sampling, length)
    return torch.full_like(scores_BV, -torch.inf).scatter_(-1, chosen_B[:, None], 0.0)


class BatchSampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of each request in a continuous batch (`choose`).

    A request passes its settings as the keyword "sampling", and its guide, if it follows a grammar, as
    "guide".

    Args:
        fail: Ends a request, given by its id, whose answer cannot follow its grammar.
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling, "guide": Guide}  # noqa: RUF012 (the base's form)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, fail: Callable[[str, ApiError], None]) -> None:
        self._fail = fail
        self._rows: list[tuple[Sampling, int]] = []
        self._states: list[Any] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Zero the tensor of settings, which transformers requires and which is not used here."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Store the settings of the next forward pass's rows; return an unused tensor.

        The pass follows at once, because batching is synchronous.
        """
        states = [request.state for request in requests_with_new_token]
        self._rows = [
            # The initial tokens of a request that was evicted to the queue include its answer, so only the
            # sum of both is its length.
            (
                state.logit_processor_kwargs.get("sampling", GREEDY),
                len(state.initial_tokens) + len(state.generated_tokens),
            )
            for state in states
        ]
        self._states = states
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V) in which only each row's chosen token is finite."""
        return choose(self._restricted(scores), self._rows)

    def _restricted(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """Return the scores without the tokens that the grammars of their rows forbid."""
        guided = [
            (row, guide, state)
            for row, state in enumerate(self._states)
            if (guide := state.logit_processor_kwargs.get("guide")) is not None
        ]
        if guided:
            scores_BV = scores_BV.clone()
        for row, guide, state in guided:
            try:
                restrict(scores_BV[row], guide.allowed(_tokens_from(state, guide.next)))
            except ApiError as error:
                self._fail(state.request_id, error)
        return scores_BV


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

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (1, V) in which only the chosen token is finite.

        Raises ApiError if the answer cannot follow its grammar.
        """
        if self._guide is not None:
            scores = scores.clone()
            restrict(scores[0], self._guide.allowed(input_ids[0, self._guide.next :].tolist()))
        return choose(scores, [(self._sampling, input_ids.shape[1])])

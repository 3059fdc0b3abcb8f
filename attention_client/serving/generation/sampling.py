"""Choice of the next tokens, after the attention client's forward pass, by each request's own settings.

transformers' continuous batching samples every request of a manager with one configuration. Here the
manager is greedy, and a logits processor leaves each row only the token that the row's own settings choose.
A greedy row is the exact argmax, whatever else is in the batch. A sampled row uses a generator seeded by the
request's seed and the position: the same seed and logits give the same tokens.

Shapes: B rows (requests with a new token), V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_length: int = 0
    end_tokens: tuple[int, ...] = ()


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

    A request passes its settings as the keyword "sampling".
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling}  # noqa: RUF012 (the base's form)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[Sampling, int]] = []

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
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V) in which only each row's chosen token is finite."""
        return choose(scores, self._rows)


class SequenceSampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of the sequential engine's one request, in ``model.generate`` (`choose`)."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (1, V) in which only the chosen token is finite."""
        return choose(scores, [(self._sampling, input_ids.shape[1])])

"""Scores of prompt tokens in continuous batching, for the requests that ask.

transformers computes logits only where a new token is chosen. For a forward pass that prefills a prompt to be
scored, the model is asked for the logits of that prompt's rows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention_client.serving.generation.sampling import GREEDY
from attention_client.serving.generation.scores import Scores, score

__all__ = ["PromptRows", "PromptScoring", "scores_prompt", "unscored_rows"]


@dataclass(frozen=True)
class PromptRows:
    """Rows of a forward pass whose logits score the next tokens of a prompt.

    Attributes:
        request_id: The request.
        rows: Indices of the rows in the pass.
        tokens: The prompt's token after each row.
        top: Likeliest tokens to report for each.
    """

    request_id: str
    rows: range
    tokens: list[int]
    top: int


def scores_prompt(state: Any) -> bool:
    """Whether a request (transformers' `RequestState`) asked for the scores of its prompt."""
    return bool(state.logit_processor_kwargs.get("sampling", GREEDY).prompt_logprobs)


def unscored_rows(batch: Sequence[Any], scored: Callable[[str], int]) -> list[PromptRows]:
    """Find the rows of a forward pass that score prompt tokens which have no score yet.

    Args:
        batch: The requests of the pass in token order (transformers' `FutureRequestState`).
        scored: Returns how many tokens of a request's prompt have scores, in order. An evicted request is
            prefilled again, but not scored again.
    """
    found, end = [], 0
    for part in batch:
        first, end = end, end + part.query_length
        state = part.state
        if not scores_prompt(state):
            continue
        sampling = state.logit_processor_kwargs["sampling"]
        begin = state.position_offset - part.query_length  # the position of the pass's first row
        # The row of a token scores the token after it.
        low = max(begin, scored(state.request_id) - 1)
        high = min(state.position_offset, sampling.prompt_length - 1)
        if low < high:
            rows = range(first + low - begin, first + high - begin)
            tokens = state.initial_tokens[low + 1 : high + 1]
            found.append(PromptRows(state.request_id, rows, tokens, sampling.logprobs or 0))
    return found


class PromptScoring:
    """A model for one forward pass that also scores prompt tokens. Its output has the usual logits.

    Args:
        model: A transformers causal language model.
        parts: The rows to score, in order.
        keep: Gets the scores of each part.
    """

    def __init__(
        self, model: Any, parts: Sequence[PromptRows], keep: Callable[[str, Scores], None]
    ) -> None:
        self._model, self._parts, self._keep = model, parts, keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model; its output's logits are those of the rows in `logits_to_keep`, or of all rows."""
        device = inputs["input_ids"].device
        rows = torch.tensor([row for part in self._parts for row in part.rows], device=device)
        kept = inputs.get("logits_to_keep")
        if kept is None:  # the model has no such option
            output = self._model(**inputs)
            self._score(output.logits[0, rows])
            return output
        output = self._model(**inputs | {"logits_to_keep": torch.cat([rows, kept.to(rows.dtype)])})
        self._score(output.logits[0, : len(rows)])
        output.logits = output.logits[:, len(rows) :]
        return output

    def _score(self, logits_TV: torch.Tensor) -> None:
        begin = 0
        for part in self._parts:
            tokens_T = torch.tensor(part.tokens, device=logits_TV.device)
            end = begin + len(part.tokens)
            self._keep(part.request_id, score(logits_TV[begin:end], tokens_T, part.top))
            begin = end

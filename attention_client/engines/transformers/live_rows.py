"""Find the tokens of a batch that `generate` still needs, so that the expert servers skip the others.

A batch of ragged prompts is padded, and an ended sequence gets placeholders until the last sequence ends.
Greedy search and sampling do not read the results of these tokens, so no server computes them. They do read
the last column of a prompt, even if it is padding. Elsewhere every token is computed, because it may be read.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

__all__ = ["LiveRows"]


_PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_READ = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


class _ReportingCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria of `generate` that also report to `LiveRows` which rows ended."""

    def __init__(self, criteria: StoppingCriteriaList, rows: LiveRows) -> None:
        super().__init__(criteria)
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done_B: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._rows.note_ended(done_B)
        return done_B


class LiveRows(threading.local):
    """Tracks which tokens of the current forward pass `generate` needs. State is per thread."""

    def __init__(self) -> None:
        self._generating = False
        self._arguments: dict[str, Any] = {}
        self._live_B: torch.Tensor | None = None
        self._tokens_T: torch.Tensor | None = None

    def wanted(self, num_tokens: int, part: slice | None = None) -> torch.Tensor | None:
        """Return which tokens of this forward pass the servers must compute; asked at each MoE layer.

        Args:
            num_tokens: T, the tokens of this layer call.
            part: Position of these tokens in the model's batch; None: they are the whole batch.

        Returns:
            bool (T,); None if all are wanted.
        """
        wanted_T = self._tokens_T
        if wanted_T is not None and part is not None:
            wanted_T = wanted_T[part]
        return wanted_T if wanted_T is not None and wanted_T.numel() == num_tokens else None

    def note_ended(self, done_B: torch.Tensor) -> None:
        """Record, after each token, which sequences ended: servers skip their rows from now on."""
        live_B = ~done_B.cpu()
        self._live_B = live_B if self._live_B is None else self._live_B & live_B

    def attach(self, model: PreTrainedModel) -> None:
        """Hook into a new model's `generate` and forward passes, so that they set what `wanted` returns."""
        generate, signature = model.generate, inspect.signature(model.generate)
        criteria = model._get_stopping_criteria

        def watched_generate(*args: Any, **kwargs: Any) -> Any:
            self._arguments = signature.bind_partial(*args, **kwargs).arguments
            self._generating, self._live_B = False, None
            try:
                return generate(*args, **kwargs)
            finally:
                self._generating, self._live_B, self._tokens_T = False, None, None

        def watched_criteria(
            generation_config: GenerationConfig, *args: Any, **kwargs: Any
        ) -> StoppingCriteriaList:
            made = criteria(generation_config, *args, **kwargs)
            self._generating = self._reads_only_tokens(generation_config)
            # Without end tokens, transformers goes on with the ended rows.
            if self._generating and any(hasattr(each, "eos_token_id") for each in made):
                return _ReportingCriteria(made, self)
            return made

        def before_forward(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self._tokens_T = self._tokens_of(kwargs) if self._generating else None

        model.generate = watched_generate
        model._get_stopping_criteria = watched_criteria
        model.register_forward_pre_hook(before_forward, with_kwargs=True)

    def _reads_only_tokens(self, config: GenerationConfig) -> bool:
        """Whether the call of `generate` reads only the logits of each live row's last column."""
        arguments = self._arguments
        return (
            arguments.get("custom_generate") is None
            and config.get_generation_mode(arguments.get("assistant_model")) in _PLAIN
            and not (config.return_dict_in_generate and any(getattr(config, x) for x in _READ))
        )

    def _tokens_of(self, kwargs: dict[str, Any]) -> torch.Tensor | None:
        input_ids = kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        if input_ids is None:
            return None
        batch, steps = input_ids.shape
        wanted_BS = torch.ones(batch, steps, dtype=torch.bool)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= steps:
            wanted_BS &= mask[:, -steps:].cpu().bool()
            wanted_BS[:, -1] = True
        if self._live_B is not None and self._live_B.shape[0] == batch:
            wanted_BS &= self._live_B[:, None]
        return None if bool(wanted_BS.all()) else wanted_BS.reshape(-1)

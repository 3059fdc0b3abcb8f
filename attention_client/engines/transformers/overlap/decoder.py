"""Double-batch overlap: run a decoder's batch as two micro-batches in turns (EaaS section 3.2)."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from prometheus_client import Counter
from transformers import PreTrainedModel

from attention_client.engines.transformers.overlap.choice import OverlapChoice
from attention_client.engines.transformers.overlap.micro_batches import MicroBatches, cut
from attention_client.engines.transformers.rotary import depends_on_length, knows_prompts
from attention_client.layer_call.turns import Task, in_turns

__all__ = ["DoubleBatch"]

_EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_MISSING = object()


class DoubleBatch:
    """Wraps one model's decoder so that its forward passes can run as two overlapped micro-batches.

    Results equal those of the whole batch, except for rounding in matrix products whose kernels depend on the
    number of rows.

    Args:
        model: Model with remote experts; its decoder is wrapped.
        mode: "on": overlap every batch that can be cut; "auto": if measured to be faster; "off": never.
        forwards: Counts forward passes by "overlap" or "whole".
    """

    def __init__(
        self, model: PreTrainedModel, mode: Literal["auto", "on", "off"], forwards: Counter
    ) -> None:
        self._mode = mode
        self._depends_on_length = depends_on_length(model)
        self._choice = OverlapChoice()
        self._forwards = {
            overlapped: forwards.labels("overlap" if overlapped else "whole")
            for overlapped in (False, True)
        }
        self._decoder: Any = model.get_decoder()
        self._plain = self._decoder.forward
        self._signature = inspect.signature(self._plain)
        self._others = next(
            (p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""
        )

        @functools.wraps(self._plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        self._decoder.forward = forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        batches = self._cut(args, kwargs) if self._mode != "off" else None
        if batches is None:
            self._forwards[False].inc()
            return self._plain(*args, **kwargs)
        size = batches.tokens, batches.sequences
        overlapped = self._mode == "on" or self._choice.choose(*size)
        self._forwards[overlapped].inc()
        started = time.monotonic()
        out = self._overlap(batches) if overlapped else self._plain(*args, **kwargs)
        self._choice.observe(*size, overlapped, time.monotonic() - started)
        return out

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroBatches | None:
        config = self._decoder.config
        plain_output = kwargs.get("return_dict", config.return_dict) and not any(
            kwargs.get(key, getattr(config, key, False)) for key in _EXTRA_OUTPUTS
        )
        # Autograd modes are per thread, so two interleaved passes would mix them up.
        if torch.is_grad_enabled() or not plain_output:
            return None
        # Rotary frequencies of the longest sequence would differ between the halves.
        if self._depends_on_length and not knows_prompts():
            return None
        given = self._signature.bind(*args, **kwargs).arguments
        return cut(given | given.pop(self._others, {}))

    def _overlap(self, batches: MicroBatches) -> Any:
        tasks = [
            Task(functools.partial(self._plain, **call), span)
            for call, span in zip(batches.calls, batches.spans, strict=True)
        ]
        with self._config_kept():
            outs = in_turns(tasks)
        first = outs[0]
        first.last_hidden_state = torch.cat([out.last_hidden_state for out in outs], batches.dim)
        if batches.cache is not None:
            first.past_key_values = batches.cache
        return first

    @contextmanager
    def _config_kept(self) -> Iterator[None]:
        """Restore `config.is_causal` after the block.

        transformers sets and resets it in each pass, but interleaved passes do not nest.
        """
        config = self._decoder.config
        before = getattr(config, "is_causal", _MISSING)
        try:
            yield
        finally:
            if before is not _MISSING:
                config.is_causal = before
            elif hasattr(config, "is_causal"):
                del config.is_causal

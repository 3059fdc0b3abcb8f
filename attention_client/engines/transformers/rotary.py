"""Rotary embeddings whose frequencies depend on a request's length: each row of a pass has its own.

For the rope types `dynamic` and `longrope`, transformers computes the frequencies of a whole pass from its
largest position, and `dynamic` keeps them for shorter requests that follow. For a request alone, under
`generate`, the frequencies of a token depend on

    n = max(tokens of the prompt, position of the token + 1)

So here transformers' own code computes the rows of each n apart, whatever else is in the pass, and however
the prompt is cut into passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationMixin

from attention_client.layer_call.turns import micro_batch_tokens

__all__ = [
    "LengthRotary",
    "depends_on_length",
    "knows_prompts",
    "length_rotaries",
    "of_prompts",
    "refuse_new_keys",
]

# Tokens of the prompt of each token's request, int64 (T) or (1); None: transformers' own behaviour.
_prompts_T: ContextVar[torch.Tensor | None] = ContextVar("prompts", default=None)


@contextlib.contextmanager
def of_prompts(lengths_T: torch.Tensor) -> Iterator[None]:
    """Inside the block, each row of a pass is computed as if its request were alone.

    Args:
        lengths_T: int64 (T), tokens of the prompt of each token's request, without its answer; or (1).
    """
    token = _prompts_T.set(lengths_T)
    try:
        yield
    finally:
        _prompts_T.reset(token)


def knows_prompts() -> bool:
    """Whether this runs in a block of `of_prompts`."""
    return _prompts_T.get() is not None


def depends_on_length(model: Any) -> bool:
    """Whether a model has rotary frequencies that depend on the longest sequence of a pass."""
    return any(_spans(module) for module in model.modules())


def length_rotaries(model: Any) -> list[LengthRotary]:
    """Return the rotary embeddings of a model whose frequencies depend on a request's length.

    They take the place of the modules' own code, once. Outside `of_prompts` they do what that did.
    """
    modules = [module for module in model.modules() if _spans(module)]
    for place, module in enumerate(modules):
        if not isinstance(module.forward, LengthRotary):
            module.forward = LengthRotary(module, place)
    return [module.forward for module in modules]


def refuse_new_keys(model: Any) -> None:
    """Raise ValueError if `generate` computes keys of a request again where its frequencies change (Phi)."""
    own = type(model).prepare_inputs_for_generation
    if depends_on_length(model) and own is not GenerationMixin.prepare_inputs_for_generation:
        raise ValueError("it computes the cache again where its rotary frequencies change")


def _spans(module: Any) -> dict[str | None, tuple[int, int]]:
    """Return the lengths between which a module's frequencies change, by layer type.

    Up to the first length they are the same, and from the second on. None is the layer type of a module that
    does not tell layers apart.
    """
    kinds = getattr(module, "rope_type", None)
    spans: dict[str | None, tuple[int, int]] = {}
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if kind == "longrope":
            given = module.config.rope_parameters
            given = given if layer_type is None else given[layer_type]
            short = int(given["original_max_position_embeddings"])
            spans[layer_type] = short, short + 1
        elif "dynamic" in str(kind):
            spans[layer_type] = int(module.config.max_position_embeddings), sys.maxsize
    return spans


class LengthRotary:
    """The code of a rotary module of transformers, for each row of a pass apart.

    Args:
        module: The module, whose `forward` this replaces.
        place: Its number among those of the model.

    Attributes:
        longest: Up to this length, in tokens, all requests have the same frequencies.
    """

    def __init__(self, module: Any, place: int) -> None:
        self._module, self._plain = module, module.forward
        self._place = place
        self._spans = _spans(module)
        self.longest = min(short for short, _ in self._spans.values())
        self._widths = {name: self._width(name) for name in self._spans}

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        """Return what the module returns, usually cosines and sines, (1, T, D) each in the dtype of x."""
        if layer_type not in self._spans:
            return self._own(x, position_ids, layer_type)
        if torch.compiler.is_exporting():
            width = self._widths[layer_type]
            if not width:
                raise ValueError("its rotary embedding does not consist of cosines and sines")
            made = torch.ops.eaas.rotary(position_ids, self._place, layer_type or "", width)
            return tuple(part.to(x.dtype) for part in made)
        prompts_T, part = _prompts_T.get(), micro_batch_tokens()
        if prompts_T is None:
            return self._own(x, position_ids, layer_type)
        if part is not None and len(prompts_T) > 1:
            prompts_T = prompts_T[part]
        return self._rows(x, position_ids, prompts_T, layer_type)

    def in_float32(self, position_ids: torch.Tensor, layer_type: str) -> Any:
        """Return cosines and sines for a compiled pass, float32 (1, T, D); "": without a layer type."""
        return self(torch.empty(0), position_ids, layer_type or None)

    def forget(self) -> None:
        """Forget the frequencies of earlier requests."""
        for layer_type in self._spans:
            self._first(layer_type)

    def _own(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> Any:
        names = {} if layer_type is None else {"layer_type": layer_type}
        return self._plain(x, position_ids, **names)

    def _first(self, layer_type: str | None) -> Any:
        """Compute a pass of one token. transformers then goes back to the frequencies of short requests."""
        device = next(self._module.buffers()).device
        position = torch.zeros(1, 1, dtype=torch.long, device=device)
        return self._own(torch.empty(0, device=device), position, layer_type)

    def _rows(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        prompts_T: torch.Tensor,
        layer_type: str | None,
    ) -> Any:
        positions_T = position_ids.reshape(-1, position_ids.shape[-1])[0]
        n_T = torch.maximum(prompts_T.to(positions_T.device), positions_T + 1)
        n_T = n_T.clamp(*self._spans[layer_type])
        order_T = n_T.argsort(stable=True)
        groups: dict[int, list[int]] = {}
        for n, position in torch.stack([n_T, positions_T])[:, order_T].T.tolist():
            groups.setdefault(n, []).append(position)
        self._first(layer_type)
        made = []
        for n, positions in groups.items():  # ascending: what transformers keeps only grows
            # A last row with the largest position of a request of n tokens.
            rows = position_ids.new_tensor([*positions, n - 1])
            made.append(self._own(x, rows.expand(*position_ids.shape[:-1], -1), layer_type))
        place_T = order_T.argsort()

        def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part[..., :-1, :] for part in parts], -2)[..., place_T, :]

        if isinstance(made[0], tuple):
            return tuple(map(joined, zip(*made, strict=True)))
        return joined(made)

    def _width(self, layer_type: str | None) -> int:
        """Return D of cosines and sines; 0: the module returns something else."""
        made = self._first(layer_type)
        is_usual = isinstance(made, tuple) and len(made) == 2 and made[0].shape == made[1].shape
        return int(made[0].shape[-1]) if is_usual else 0

"""Experts as the checkpoint has them, one by one, and nothing else of the model.

Only the bytes of the wanted experts are read from the memory-mapped shards. transformers' own rules
turn them into its layout, so that every way to store experts that transformers can load can be
served. L MoE layers, E logical experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eaas.checkpoint import Checkpoint, ExpertTensor, quiet_transformers
from eaas.errors import CorruptShardError, MissingShardError

__all__ = ["ExpertForm", "ExpertReader", "ExpertWeights"]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One expert. Shapes are for the plain layout; `ExpertForm.is_transposed` swaps the two
    dimensions.

    Attributes:
        up: `gate_up_proj` (2I, H), or `up_proj` (I, H) for an expert without a gate.
        down: `down_proj` (H, I).
        up_bias: (2I) or (I), or None.
        down_bias: (H), or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the tensors, bytes."""
        tensors = (self.up, self.down, self.up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same expert in another dtype; tensors that have it already are shared."""
        return self._each(lambda tensor: tensor.to(dtype))

    def plain(self, form: ExpertForm) -> ExpertWeights:
        """The weights as (out, in): up (2I, H) or (I, H), down (H, I). Views, not copies."""
        if not form.is_transposed:
            return self
        return ExpertWeights(self.up.t(), self.down.t(), self.up_bias, self.down_bias)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
        biases = (None if bias is None else change(bias) for bias in (self.up_bias, self.down_bias))
        return ExpertWeights(change(self.up), change(self.down), *biases)


@dataclass(frozen=True)
class ExpertForm:
    """How the experts of one layer compute.

    Attributes:
        has_gate: Whether `up` is gate and up in one.
        is_transposed: Whether weights are (in, out) rather than (out, in).
        activate: From the up product to the down product's input: the model's `_apply_gate` or
            `act_fn`.
    """

    has_gate: bool
    is_transposed: bool
    activate: Callable[[torch.Tensor], torch.Tensor]


class ExpertReader:
    """Reads single experts.

    Args:
        checkpoint: Where the weights come from.
        dtype: What to hand them out in; the checkpoint's own by default.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self.dtype: torch.dtype = dtype or getattr(torch, checkpoint.shape.dtype)
        self._checkpoint = checkpoint
        self._modules = list(checkpoint.expert_modules().values())
        self.forms: tuple[ExpertForm, ...] = tuple(_form(module) for module in self._modules)
        self._tensors: list[list[ExpertTensor]] = [[] for _ in self._modules]
        for tensor in checkpoint.expert_tensors:
            self._tensors[tensor.layer].append(tensor)

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return self._checkpoint.shape.num_experts

    def read(self, layer: int, experts: Collection[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """The experts' weights, in ascending order; each is alone in its memory.

        Raises:
            MissingShardError, CorruptShardError: A tensor cannot be read; names the file and the
                tensor.
        """
        yield from self._load_layer(layer, sorted(experts)).items()

    def release(self) -> None:
        """Closes the shards, so that their pages no longer count as this process's memory."""
        self._checkpoint.release()

    def _load_layer(self, layer: int, experts: list[int]) -> dict[int, ExpertWeights]:
        """Reads experts (ascending) of one layer into the skeleton and takes them out again."""
        module, name = self._modules[layer], self._checkpoint.shape.layer_names[layer]
        meta = dict(module.named_parameters(recurse=False))
        places = {expert: place for place, expert in enumerate(experts)}
        rows = {
            tensor.key: _Rows(
                self._checkpoint, tensor.key, None if tensor.expert is not None else experts
            )
            for tensor in self._tensors[layer]
            if tensor.expert is None or tensor.expert in places
        }
        try:
            for parameter, full in meta.items():
                shrunk = torch.empty(len(experts), *full.shape[1:], dtype=self.dtype, device="meta")
                module.register_parameter(parameter, nn.Parameter(shrunk, requires_grad=False))
            self._convert(rows, name)
            parameters = dict(module.named_parameters(recurse=False))
        finally:
            for parameter, full in meta.items():
                module.register_parameter(parameter, full)
        up = "gate_up_proj" if self.forms[layer].has_gate else "up_proj"

        def take(parameter: str, place: int) -> torch.Tensor | None:
            # A copy: the parameter may be a view of the mapped file, and experts go one by one.
            whole = parameters.get(parameter)
            return None if whole is None else whole.detach()[place].clone()

        return {
            expert: ExpertWeights(
                up=_present(take(up, place)),
                down=_present(take("down_proj", place)),
                up_bias=take(f"{up}_bias", place),
                down_bias=take("down_proj_bias", place),
            )
            for expert, place in places.items()
        }

    def _convert(self, rows: Mapping[str, _Rows], name: str) -> None:
        """Lets transformers put the rows into the skeleton's module of that name."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        skeleton = self._checkpoint.skeleton
        config = LoadStateDictConfig(
            dtype=self.dtype, weight_mapping=self._checkpoint.weight_mapping()
        )
        with quiet_transformers():
            info, _ = convert_and_load_state_dict_in_model(skeleton, rows, config)
        path = self._checkpoint.path
        for parameter, error in info.conversion_errors.items():
            raise CorruptShardError(
                f"{path}: {parameter} cannot be put together ({error.strip().splitlines()[-1]}): "
                "fetch the shards again"
            )
        for parameter, found, expected in sorted(info.mismatched_keys):
            raise CorruptShardError(
                f"{path}: {parameter} is {tuple(found)} where config.json says {tuple(expected)}: "
                "fetch the checkpoint again"
            )
        for parameter in sorted(info.missing_keys):
            if parameter.rpartition(".")[0] == name:
                raise MissingShardError(f"{path}: nothing holds {parameter}: complete the download")


class _Rows:
    """A tensor, or some experts' rows of it, that is read when transformers asks for it."""

    def __init__(self, checkpoint: Checkpoint, key: str, experts: list[int] | None) -> None:
        self._checkpoint, self._key, self._experts = checkpoint, key, experts
        self._slice = checkpoint.slice(key)

    def __getitem__(self, item: Any) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            if self._experts is None:
                return self._slice[item]  # type: ignore[no-any-return]
            return torch.cat([self._slice[expert : expert + 1] for expert in self._experts])
        except (OSError, SafetensorError) as error:
            raise CorruptShardError(
                f"{self._checkpoint.keys[self._key]}: tensor {self._key} cannot be read ({error}): "
                "fetch the shard again"
            ) from error


def _form(module: Any) -> ExpertForm:
    """The form of an experts module; the activation stays bound to it (it has no weights)."""
    return ExpertForm(
        has_gate=module.has_gate,
        is_transposed=module.is_transposed,
        activate=module._apply_gate if module.has_gate else module.act_fn,
    )


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    """A tensor that every expert has; `_convert` has made sure of it."""
    assert tensor is not None
    return tensor

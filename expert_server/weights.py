"""The experts that this server holds, and nothing else of the model.

Only the bytes of the wanted experts are read from the memory-mapped shards. transformers' own rules
turn them into its layout, so that every way to store experts that transformers can load can be
served. L MoE layers, E logical experts, H hidden, I intermediate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eaas.checkpoint import Checkpoint, ExpertTensor, quiet_transformers
from eaas.errors import CorruptShardError, MissingShardError

__all__ = ["ExpertForm", "ExpertStore", "ExpertWeights"]


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


class ExpertStore:
    """Loads and unloads single replicas; readers never wait for a load.

    Args:
        checkpoint: Where the weights come from.
        dtype: What to hold them in; the checkpoint's own by default.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self.dtype: torch.dtype = dtype or getattr(torch, checkpoint.shape.dtype)
        self._checkpoint = checkpoint
        self._modules = list(checkpoint.expert_modules().values())
        self._forms = [_form(module) for module in self._modules]
        self._tensors: list[list[ExpertTensor]] = [[] for _ in self._modules]
        for tensor in checkpoint.expert_tensors:
            self._tensors[tensor.layer].append(tensor)
        # Readers take no lock: entries are put in whole, and operations on a dict are atomic.
        self._weights: dict[tuple[int, int], ExpertWeights] = {}
        self._changing = threading.Lock()
        self._bytes = 0

    @property
    def count(self) -> int:
        """Replicas held."""
        return len(self._weights)

    @property
    def bytes(self) -> int:
        """Memory of the replicas held."""
        return self._bytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether the replica is here."""
        return (layer, expert) in self._weights

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """The replica's tensors. Raises LookupError where it is not held."""
        try:
            return self._weights[layer, expert]
        except KeyError:
            raise LookupError(f"layer {layer}: expert {expert} is not held here") from None

    def form(self, layer: int) -> ExpertForm:
        """How that layer's experts compute. Raises LookupError for a layer that the model lacks."""
        if not 0 <= layer < len(self._forms):
            raise LookupError(
                f"layer {layer}: the model has MoE layers 0 to {len(self._forms) - 1}"
            )
        return self._forms[layer]

    def load(self, wanted: Mapping[int, Collection[int]]) -> int:
        """Loads what is missing of the wanted replicas, layer by layer.

        Args:
            wanted: MoE layer -> logical experts.

        Returns:
            Bytes of weights newly held.

        Raises:
            LookupError: The model has no such layer or expert; nothing is loaded.
            MissingShardError, CorruptShardError: A tensor cannot be read; names the file and the
                tensor. What was held, and the layers before that one, stay.
        """
        num_experts = self._checkpoint.shape.num_experts
        for layer, experts in wanted.items():
            self.form(layer)
            for expert in experts:
                if not 0 <= expert < num_experts:
                    raise LookupError(
                        f"layer {layer}: the model has experts 0 to {num_experts - 1}"
                    )
        with self._changing:
            before = self._bytes
            try:
                for layer in sorted(wanted):
                    missing = sorted({e for e in wanted[layer] if not self.holds(layer, e)})
                    if missing:
                        loaded = self._load_layer(layer, missing)
                        self._weights.update(loaded)
                        self._bytes += sum(weights.nbytes for weights in loaded.values())
            finally:
                self._checkpoint.release()
            return self._bytes - before

    def unload(self, unwanted: Mapping[int, Collection[int]]) -> None:
        """Drops replicas; those that are not held are passed over."""
        with self._changing:
            for layer, experts in unwanted.items():
                for expert in experts:
                    weights = self._weights.pop((layer, expert), None)
                    self._bytes -= weights.nbytes if weights else 0

    def _load_layer(self, layer: int, experts: list[int]) -> dict[tuple[int, int], ExpertWeights]:
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
        up = "gate_up_proj" if self._forms[layer].has_gate else "up_proj"

        def take(parameter: str, place: int) -> torch.Tensor | None:
            # A copy: the parameter may be a view of the mapped file, and experts go one by one.
            whole = parameters.get(parameter)
            return None if whole is None else whole.detach()[place].clone()

        return {
            (layer, expert): ExpertWeights(
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

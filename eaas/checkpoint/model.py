"""A checkpoint in expert servers and attention clients, as transformers loads it; tensors are read on demand.

The functions import transformers when they run, because the import takes seconds and the launcher needs
neither transformers nor numpy.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.config_file import EXPERTS_PER_TOKEN, NUM_EXPERTS
from eaas.checkpoint.files import CheckpointFiles, dense, read_files
from eaas.checkpoint.fit import TORCH_DTYPES, common_format, refuse_misfits
from eaas.checkpoint.formats import StoredFormat
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.quiet import quiet_transformers
from eaas.checkpoint.shard import Shard, TensorSlice
from eaas.checkpoint.source import CONFIG, Source
from eaas.checkpoint.transformers_files import model_config
from eaas.errors import (
    CorruptShardError,
    MissingShardError,
    UnsupportedModelError,
)
from eaas.garbage_collection import collector_off
from eaas.log import one_line

if TYPE_CHECKING:
    import torch
    from torch import nn

    from eaas.types import ModelShape

__all__ = ["Checkpoint", "ExpertTensor"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertTensor:
    """A checkpoint tensor that belongs to a parameter of a layer's experts module.

    Attributes:
        key: Name in the checkpoint; of a quantised weight without the format's suffix.
        layer: MoE layer.
        expert: Logical expert; None if the first dimension has all E experts.
        target: Name of the parameter in the model.
        pattern: Source pattern of transformers' conversion rule; None for a plain renaming.
    """

    key: str
    layer: int
    expert: int | None
    target: str
    pattern: str | None


class Checkpoint:
    """A Mixture-of-Experts checkpoint with separable experts; created by `Checkpoint.open`.

    Attributes:
        source: Where the files are.
        config: transformers' config.
        skeleton: The model on the meta device, without weights.
        shape: Properties that the cluster must agree on. H is the width of an expert's input.
    """

    def __init__(
        self, files: CheckpointFiles, config: Any, skeleton: Any, shape: ModelShape
    ) -> None:
        self.source = files.source
        self.config = config
        self.skeleton = skeleton
        self.shape = shape
        self._files = files
        self._shards: dict[str, Shard] = {}

    @classmethod
    def open(cls, source: str | os.PathLike[str] | Source) -> Checkpoint:
        """Validate a checkpoint and read its config, index and headers.

        Args:
            source: A local directory, or where else its files are.

        Raises:
            NotACheckpointError, MissingShardError, CorruptShardError, CheckpointError: See `precheck`.
            DenseModelError: The model has no experts.
            UnsupportedModelError: transformers does not know the model, or its experts are not separable.
        """
        files = read_files(source)
        with quiet_transformers():
            config = _load_config(files)
            model_class = _model_class(files, config)
            skeleton = _build_skeleton(files, config, model_class)
        modules = {name: m for name, m in skeleton.named_modules() if _is_experts_class(type(m))}
        if not modules:
            raise dense(files.source, config.model_type)
        checkpoint = cls(files, config, skeleton, _shape(files, config, skeleton, modules))
        # Experts have digests of their own.
        digest = files.source.digest or files.digest(
            checkpoint.stored_keys(checkpoint.other_keys())
        )
        checkpoint.shape = replace(checkpoint.shape, digest=digest)
        refuse_misfits(
            files.source.place, skeleton, checkpoint._targets, files.tensors, files.matrices
        )
        return checkpoint

    @property
    def path(self) -> Path:
        """The directory; attention clients read local checkpoints only."""
        assert isinstance(self.source, LocalSource)
        return self.source.directory

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """All tensors of the checkpoint, as they are stored: name -> name of the shard that holds it."""
        return {name: entry.shard for name, entry in self._files.tensors.items()}

    @property
    def config_text(self) -> bytes:
        """config.json, with the section of a side file that tells how the weights are stored."""
        return json.dumps(self._files.config).encode()

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are stored quantised."""
        return bool(self._files.matrices)

    def expert_modules(self) -> dict[str, nn.Module]:
        """Module of the routed experts of each MoE layer, in order: name -> module on the meta device."""
        return {name: self.skeleton.get_submodule(name) for name in self.shape.layer_names}

    def expert_keys(self) -> frozenset[str]:
        """Names of the routed experts' stored tensors: expert servers load them, attention clients do not."""
        return self.stored_keys(tensor.key for tensor in self.expert_tensors)

    def other_keys(self) -> frozenset[str]:
        """Names of the weights that attention clients load, without those that the model does not use."""
        return frozenset(self._targets) - {tensor.key for tensor in self.expert_tensors}

    def stored_keys(self, weights: Iterable[str]) -> frozenset[str]:
        """Names of the stored tensors of weights: several for a quantised one, else the weight itself."""
        matrices = self._files.matrices
        return frozenset(
            key
            for name in weights
            for key in (matrices[name].parts.values() if name in matrices else (name,))
        )

    @cached_property
    def expert_tensors(self) -> tuple[ExpertTensor, ...]:
        """All tensors of the routed experts, by layer and in transformers' natural order of names.

        Raises UnsupportedModelError if a parameter has neither one tensor per expert nor one for all.
        """
        layers = {name: layer for layer, name in enumerate(self.shape.layer_names)}
        groups: dict[tuple[int, str, str | None], list[str]] = defaultdict(list)
        for key, (target, pattern) in self._targets.items():
            module = target.rpartition(".")[0]
            if module in layers:
                groups[layers[module], target, pattern].append(key)
        tensors = []
        num_experts = self.shape.num_experts
        for (layer, target, pattern), keys in sorted(groups.items(), key=lambda item: item[0][0]):
            if len(keys) == num_experts and num_experts > 1:
                # transformers derives the experts' numbers from this order.
                tensors += [
                    ExpertTensor(key, layer, expert, target, pattern)
                    for expert, key in enumerate(keys)
                ]
            elif len(keys) == 1 and self._shape_of(keys[0])[:1] == (num_experts,):
                tensors.append(ExpertTensor(keys[0], layer, None, target, pattern))
            else:
                raise UnsupportedModelError(
                    f"{self.source}: {target} is made of {len(keys)} tensors ({keys[0]}, ...) for "
                    f"{num_experts} experts: save the model again with this version of transformers"
                )
        return tuple(tensors)

    def nbytes(self, key: str) -> int:
        """Size of a weight's stored tensors in bytes, from the headers that are already read."""
        return sum(self._files.tensors[name].nbytes for name in self.stored_keys((key,)))

    def slice(self, key: str) -> TensorSlice | QuantizedSlice:
        """Return a weight that is read when indexed: `slice[...]`, or `slice[a:b]` for some rows.

        Raises KeyError for an unknown name, MissingShardError or CorruptShardError if the shard was removed
        or changed since the checkpoint was opened.
        """
        matrix = self._files.matrices.get(key)
        if matrix is None:
            return self._stored_slice(key)
        parts = {part: self._stored_slice(name) for part, name in matrix.parts.items()}
        return QuantizedSlice(matrix, parts, matrix.shape)

    def release(self) -> None:
        """Close the shard files at the end of a load, except those of which a slice remains."""
        self._shards.clear()

    def weight_mapping(self) -> list[Any]:
        """Return transformers' rules to rename and convert tensors on loading; fresh, as they keep state."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self.skeleton))

    @cached_property
    def stored_format(self) -> StoredFormat | None:
        """Number format of the routed experts, if they are quantised.

        Raises UnsupportedModelError if two have different ones.
        """
        matrices = self._files.matrices
        return common_format(
            self.source,
            (
                (tensor.key, matrices[tensor.key].stored if tensor.key in matrices else None)
                for tensor in self.expert_tensors
                if tensor.key in matrices
                or len(self._shape_of(tensor.key)) - (tensor.expert is None) > 1
            ),
        )

    def _weights(self) -> frozenset[str]:
        """Names of all weights: quantised ones by the name that the model expects."""
        matrices = self._files.matrices
        parts = {part for matrix in matrices.values() for part in matrix.parts.values()}
        return frozenset(self._files.tensors) - parts | frozenset(matrices)

    def _shape_of(self, key: str) -> tuple[int, ...]:
        matrix = self._files.matrices.get(key)
        return self._files.tensors[key].shape if matrix is None else matrix.shape

    def _stored_slice(self, key: str) -> TensorSlice:
        shard = self.keys[key]
        try:
            if shard not in self._shards:
                self._shards[shard] = self.source.open_shard(shard, self._files.headers[shard])
            return self._shards[shard].slice(key)
        except FileNotFoundError as error:
            raise MissingShardError(
                f"{self.source.place(shard)} (tensor {key}) is missing: restore it"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptShardError(
                f"{self.source.place(shard)}: tensor {key} cannot be read ({error!r}): "
                "download the shard again"
            ) from error

    @cached_property
    def _targets(self) -> dict[str, tuple[str, str | None]]:
        """Map each weight to (parameter or buffer of the model, conversion rule), in natural order.

        Same steps as transformers' `convert_and_load_state_dict_in_model`.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = self.weight_mapping()
        renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        prefix, places = self.skeleton.base_model_prefix, self.skeleton.state_dict()
        targets = {}
        for key in sorted(self._weights(), key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, places)
            if target not in places and key in places:
                target, pattern = rename_source_key(key, [], [], prefix, places)
            if target in places:
                targets[key] = (target, pattern)
        return targets


def _load_config(files: CheckpointFiles) -> Any:
    with _directory_with_config(files) as directory:
        config = model_config(directory, files.config, files.source)
    with collector_off():
        from transformers import PreTrainedConfig
    # Weights are dequantised by this package, not by transformers.
    text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{files.source.place(CONFIG)}: {files.config['model_type']} has no text_config: remove it"
        )
    for part in (config, text):
        vars(part).pop("quantization_config", None)
    return config


@contextmanager
def _directory_with_config(files: CheckpointFiles) -> Iterator[Path]:
    """A local directory with config.json, as transformers wants it."""
    if isinstance(files.source, LocalSource):
        yield files.source.directory
        return
    with tempfile.TemporaryDirectory(prefix="eaas-config-") as name:
        Path(name, CONFIG).write_text(json.dumps(files.config))
        yield Path(name)


def _model_class(files: CheckpointFiles, config: Any) -> type:
    """Return the text-generation class for a config; raise if its model code has no separable experts."""
    with collector_off():
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.auto_factory import _get_model_class

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"{files.source}: transformers has no causal language model for model_type "
            f"{config.model_type!r}: use a text-generation checkpoint"
        )
    # This imports the model's code and most of transformers.
    with collector_off():
        model_class: type = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    code = vars(sys.modules[model_class.__module__])
    if not any(isinstance(cls, type) and _is_experts_class(cls) for cls in code.values()):
        if _has_experts(config):
            raise UnsupportedModelError(
                f"{files.source}: transformers' {config.model_type} has custom experts code "
                "outside its experts interface: this architecture cannot be served"
            )
        raise dense(files.source, config.model_type)
    return model_class


def _build_skeleton(files: CheckpointFiles, config: Any, model_class: Any) -> Any:
    from eaas.checkpoint.construct import construct

    try:
        return construct(model_class, config, _weights_dtype(files, config))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        raise UnsupportedModelError(
            f"{files.source}: transformers cannot build this {config.model_type} model "
            f"({one_line(error)}): check config.json"
        ) from error


def _weights_dtype(files: CheckpointFiles, config: Any) -> torch.dtype:
    """Dtype of the model's weights: the config's, else that of the first floating-point tensor.

    transformers chooses the same, except float64, which no kernel and no message has: its weights become
    float32.
    """
    import torch

    names = (TORCH_DTYPES.get(entry.dtype) for entry in files.tensors.values())
    dtype = config.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, next((name for name in names if name), "float32"))
    if dtype is torch.float64:
        _LOG.info("%s: its float64 weights are rounded to float32", files.source)
        dtype = torch.float32
    return dtype  # type: ignore[no-any-return]


def _is_experts_class(cls: type) -> bool:
    """Whether a class holds a layer's routed experts (transformers' `use_experts_implementation`)."""
    return hasattr(cls, "_apply_gate") and hasattr(getattr(cls, "forward", None), "__wrapped__")


def _has_experts(config: Any) -> bool:
    """Whether a config or a part of it (dbrx's ffn_config) has more than one expert, and reads the number.

    A config of a dense architecture keeps fields that it does not know.
    """
    text = config.get_text_config()
    parts = [text, *(getattr(text, name, None) for name in text.sub_configs)]
    return any(
        _as_int(getattr(part, name, None)) > 1
        and (hasattr(type(part), name) or name in part.attribute_map)
        for part in parts
        for name in NUM_EXPERTS
    )


def _shape(
    files: CheckpointFiles, config: Any, skeleton: Any, modules: Mapping[str, nn.Module]
) -> ModelShape:
    """Compute what all processes must agree on, from config and modules; the digest comes later."""
    from eaas.types import ModelShape

    name = f"{files.source}: {config.model_type}"
    sizes = set()
    for module in modules.values():
        if any("." in parameter for parameter, _ in module.named_parameters()):
            raise UnsupportedModelError(
                f"{name} has parameters shared by its experts: not supported"
            )
        num_experts, *dims = module.get_parameter("down_proj").shape
        sizes.add((num_experts, dims[1 if module.is_transposed else 0]))
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"{name} has layers with different experts or widths ({sorted(sizes)}): not supported"
        )
    ((num_experts, hidden_size),) = sizes
    text = config.get_text_config()
    top_k = max(_as_int(getattr(text, alias, None)) for alias in EXPERTS_PER_TOKEN)
    if not 1 <= top_k <= num_experts:
        raise UnsupportedModelError(
            f"{name}: config.json has {top_k} experts per token of {num_experts}: correct it"
        )
    return ModelShape(
        model_type=config.model_type,
        num_experts=num_experts,
        hidden_size=hidden_size,
        top_k=top_k,
        layer_names=tuple(modules),
        dtype=str(skeleton.dtype).removeprefix("torch."),
        digest="",
    )


def _as_int(value: object) -> int:
    """Convert a config value (a number, or a list with one number per layer) to an integer; else 0."""
    if isinstance(value, list):
        return max(map(_as_int, value), default=0)
    return value if isinstance(value, int) else 0

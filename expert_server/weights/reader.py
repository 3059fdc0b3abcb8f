"""Reads single experts of a checkpoint, as an expert server loads its share of a placement.

Only the wanted experts' bytes are read from the shards. transformers' own conversion rules turn them into its
layout, so every storage format that transformers can load can be served. L MoE layers, E logical experts, H
hidden, I intermediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, cast

import torch
import xxhash
from torch import nn

from eaas.checkpoint import Checkpoint, ExpertTensor
from eaas.checkpoint.pieces import Pause, at_once
from eaas.checkpoint.quantized import QuantizedMatrix, concatenate
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.shard import TensorSlice, prefetch
from eaas.errors import CorruptShardError, MissingShardError, UnsupportedModelError
from eaas.memory import huge_memory
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["ExpertReader"]

# Bytes read at once: enough to hide the overhead of a chunk, little compared with a server's share.
_CHUNK_BYTES = 16 << 20
_NO_RULE = ""
_ALIGNMENT = 64  # Bytes.

_Digests = Sequence[xxhash.xxh3_64]
_Found = dict[str, torch.Tensor | list[QuantizedMatrix]]
_Chunk = tuple[_Found, _Digests]
"""Parameter of the experts module -> rows (or matrices) of the chunk's experts, and each expert's digest."""


class ExpertReader:
    """Reads single experts of the checkpoint, in chunks of some megabytes. One thread at a time.

    Args:
        checkpoint: Source of the weights.

    Attributes:
        dtype: The checkpoint's dtype, in which weights are returned.
        forms: How the experts of each MoE layer compute.
        stored: Number format of quantised experts; None: they are floats of `dtype`.

    Raises:
        UnsupportedModelError: The experts have several formats.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.core_model_loading import WeightConverter

        self.dtype: torch.dtype = getattr(torch, checkpoint.shape.dtype)
        self.stored = checkpoint.stored_format
        self._checkpoint = checkpoint
        self._modules = list(checkpoint.expert_modules().values())
        self.forms: tuple[ExpertForm, ...] = tuple(_form(module) for module in self._modules)
        # MoE layer -> parameter -> pattern of the rule, if any -> tensors, expert by expert. Digests take an
        # expert's bytes in this order.
        self._sources: list[dict[str, dict[str, list[ExpertTensor]]]] = [{} for _ in self.forms]
        for tensor in sorted(checkpoint.expert_tensors, key=lambda tensor: tensor.target):
            parts = self._sources[tensor.layer].setdefault(tensor.target, {})
            parts.setdefault(tensor.pattern or _NO_RULE, []).append(tensor)
        # Memory of the last two chunks, the newer one first. Only reading ahead needs both.
        self._buffers: list[dict[str, torch.Tensor]] = [{}, {}]
        self._rules = {
            pattern: rule
            for rule in checkpoint.weight_mapping()
            if isinstance(rule, WeightConverter)
            for pattern in rule.source_patterns
        }

    @property
    def num_experts(self) -> int:
        """Number of logical experts in each MoE layer, routed ones only."""
        return self._checkpoint.shape.num_experts

    def read(
        self,
        layer: int,
        experts: Collection[int],
        pause: Pause = at_once,
        ahead: Executor | None = None,
    ) -> Iterator[tuple[int, ExpertWeights]]:
        """Read experts of a layer, for the store to hand to the kernel; yield each, in ascending order.

        An expert is a view of a chunk whose memory is reused, so it is valid until the next step only. Copy
        it, and drop the view.

        Args:
            layer: MoE layer.
            experts: Logical experts.
            pause: Called before each piece.
            ahead: Reads and digests a chunk while the caller packs the one before. None: the caller's thread
                does both, in turn.

        Raises:
            MissingShardError, CorruptShardError: A tensor cannot be read; names the file and the tensor.
        """
        wanted = sorted(experts)
        # A layer without tensors has 0 bytes; `_read_chunk` then names what is missing.
        count = max(1, _CHUNK_BYTES // max(1, self.expert_bytes(layer)))
        none: list[int] = []
        chunks = [wanted[start : start + count] for start in range(0, len(wanted), count)]
        if ahead is None:
            self._prefetch(layer, wanted[:count], pause)
            for chunk, following in zip_longest(chunks, chunks[1:], fillvalue=none):
                read = self._read_chunk(layer, chunk, pause)
                # The system reads the next chunk while this one is packed.
                self._prefetch(layer, following, pause)
                yield from self._experts(layer, chunk, *read)
                del read  # Its memory is reused for the next chunk.
            return
        readings = deque[Future[_Chunk]](
            ahead.submit(self._read_other, layer, chunks[:2], pause) for _ in chunks[:1]
        )
        try:
            for place, chunk in enumerate(chunks, 1):
                read = readings.popleft().result()
                if chunks[place:]:
                    some = chunks[place : place + 2]
                    readings.append(ahead.submit(self._read_other, layer, some, pause))
                yield from self._experts(layer, chunk, *read)
        finally:
            # The read must not fill its buffer while the next layer is read.
            wait(readings)

    def expert_bytes(self, layer: int) -> int:
        """Size of one stored expert of a layer, in bytes, from headers: for chunks and a load's progress."""
        return sum(
            self._checkpoint.nbytes(tensors[0].key)
            // (self.num_experts if tensors[0].expert is None else 1)
            for sources in self._sources[layer].values()
            for tensors in sources.values()
        )

    def elsewhere(self) -> Iterable[object]:
        """Iterate over the servers that have the bytes; reads ask the current one first.

        Empty for a local checkpoint. The store retries an expert with a wrong digest.
        """
        return self._checkpoint.source.others()

    def place_of(self, layer: int, expert: int) -> str:
        """Describe the tensors and files that an expert is read from, for an error message."""
        keys: dict[str, list[str]] = {}
        for sources in self._sources[layer].values():
            for tensors in sources.values():
                key = tensors[0 if tensors[0].expert is None else expert].key
                place = self._checkpoint.source.place(self._checkpoint.keys[key])
                keys.setdefault(place, []).append(key)
        return "; ".join(f"{shard}: tensor {' or '.join(of)}" for shard, of in keys.items())

    def release(self) -> None:
        """Close the shards and free the chunks' memory, at the end of a load."""
        self._checkpoint.release()
        self._buffers = [{}, {}]

    def _prefetch(self, layer: int, experts: list[int], pause: Pause) -> None:
        """Have the system or peers read these experts' bytes ahead, so that `_read_chunk` waits less."""
        if not experts:
            return
        ahead = [
            stored
            for sources in self._sources[layer].values()
            for tensors in sources.values()
            for part in self._parts(tensors, experts)
            for stored in (part.parts.values() if isinstance(part, QuantizedSlice) else (part,))
        ]
        prefetch(ahead, pause)

    def _experts(
        self, layer: int, chunk: list[int], found: _Found, digests: _Digests
    ) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the experts of a chunk in memory, with weights and digests, for the caller to pack."""
        up = "gate_up_proj" if self.forms[layer].has_gate else "up_proj"
        up_bias, down_bias = found.get(f"{up}_bias"), found.get("down_proj_bias")
        # Biases are never matrices.
        assert not isinstance(up_bias, list)
        assert not isinstance(down_bias, list)
        for place, expert in enumerate(chunk):
            yield (
                expert,
                ExpertWeights(
                    up=found[up][place],
                    down=found["down_proj"][place],
                    up_bias=None if up_bias is None else up_bias[place],
                    down_bias=None if down_bias is None else down_bias[place],
                    digest=digests[place].intdigest() or 1,  # 0 means unknown
                ),
            )

    def _read_other(self, layer: int, chunks: list[list[int]], pause: Pause) -> _Chunk:
        """Read the first of these chunks into the other buffer, because the previous chunk is still in use.

        Over a network, the next chunk is on the way meanwhile. A disk would only seek more.
        """
        self._buffers.reverse()
        if self._checkpoint.source.is_remote:
            for experts in chunks:
                self._prefetch(layer, experts, pause)
        return self._read_chunk(layer, chunks[0], pause)

    def _read_chunk(self, layer: int, experts: list[int], pause: Pause) -> _Chunk:
        """Read a chunk: parameter of the experts module -> its rows for these experts (ascending).

        Each expert's bytes go into its digest.
        """
        digests = [xxhash.xxh3_64() for _ in experts]
        module, name = self._modules[layer], self._checkpoint.shape.layer_names[layer]
        wanted = {
            parameter: torch.Size([len(experts), *full.shape[1:]])
            for parameter, full in module.named_parameters(recurse=False)
        }
        found: _Found = {}
        with _shrunk(module, wanted):
            for target, sources in self._sources[layer].items():
                found |= self._convert(target, sources, experts, pause, digests)
        source = self._checkpoint.source
        for parameter, shape in wanted.items():
            full_name = f"{name}.{parameter}"
            if full_name not in found:
                raise MissingShardError(
                    f"{source}: no file holds {full_name}, which the model of config.json has: use files "
                    "and config.json of one version"
                )
            is_shape = _shape(found[full_name], self.forms[layer].is_transposed)
            if is_shape != shape:
                raise CorruptShardError(
                    f"{source}: {full_name} is {tuple(is_shape)} where config.json says "
                    f"{tuple(shape)}: use files and config.json of one version"
                )
        return {parameter: found[f"{name}.{parameter}"] for parameter in wanted}, digests

    def _convert(
        self,
        target: str,
        sources: Mapping[str, list[ExpertTensor]],
        experts: list[int],
        pause: Pause,
        digests: _Digests,
    ) -> _Found:
        """Convert these experts' parts of a parameter by transformers' rule: name -> tensor, or matrices.

        Takes the same steps as transformers' `convert_and_load_state_dict_in_model`, which would go through
        the names of the whole model for each chunk.
        """
        from transformers.core_model_loading import SkipParameters
        from transformers.utils.loading_report import LoadStateDictInfo

        located = {name: self._parts(tensors, experts) for name, tensors in sources.items()}
        name = target.rpartition(".")[2]
        rule = self._rules.get(next(iter(sources)))
        patterns = (
            list(located) if rule is None else [p for p in rule.source_patterns if p in located]
        )
        if any(isinstance(part, QuantizedSlice) for column in located.values() for part in column):
            if rule is not None and not _only_stacks(rule):
                raise UnsupportedModelError(
                    f"{self._checkpoint.source}: {target} is quantised, and transformers changes it on "
                    "loading: dequantise the checkpoint with transformers and save it"
                )
            columns = [located[pattern] for pattern in patterns]
            return {target: self._matrices(target, columns, pause, digests)}
        parts = cast("Mapping[str, list[TensorSlice]]", located)
        if rule is None or (_only_stacks(rule) and _are_alike(parts)):
            in_order = [parts[pattern] for pattern in patterns]
            return {target: self._stack(name, in_order, pause, digests)}
        # The reader owns the rule, and `convert` empties what it collected.
        rule.collected_tensors = {
            pattern: [self._stack(pattern, [parts[pattern]], pause, digests)]
            if tensors[0].expert is None
            else [
                self._whole(part, pause, digest)
                for part, digest in zip(parts[pattern], digests, strict=True)
            ]
            for pattern, tensors in sources.items()
        }
        skeleton = self._checkpoint.skeleton
        info = LoadStateDictInfo(set(), set(), set(), [], {}, set())
        try:
            found: _Found = rule.convert(
                target, model=skeleton, config=skeleton.config, loading_info=info
            )
        except SkipParameters as error:
            why = info.conversion_errors[target].strip().splitlines()[-1]
            raise CorruptShardError(
                f"{self._checkpoint.source}: {target} cannot be converted ({why}): "
                "use files and config.json of one version"
            ) from error
        return found

    def _parts(
        self, tensors: list[ExpertTensor], experts: list[int]
    ) -> list[TensorSlice | QuantizedSlice]:
        """Locate each expert's part of a source: its own tensor, or its row of the layer's tensor."""
        if tensors[0].expert is None:
            whole = self._checkpoint.slice(tensors[0].key)
            return [whole.row(expert) for expert in experts]
        return [self._checkpoint.slice(tensors[expert].key) for expert in experts]

    def _matrices(
        self,
        target: str,
        columns: Sequence[Sequence[TensorSlice | QuantizedSlice]],
        pause: Pause,
        digests: _Digests,
    ) -> list[QuantizedMatrix]:
        """Read the matrix of each expert; an expert's parts, gate and up, lie one below the other.

        Like `_stack`, reads to memory that is kept for the next chunk.
        """
        rows = [
            _quantized(str(self._checkpoint.source), target, row)
            for row in zip(*columns, strict=True)
        ]
        stored = [tensor for row in rows for part in row for tensor in part.parts.values()]
        size = sum(_aligned(tensor.nbytes) for tensor in stored)
        free = self._buffer(target.rpartition(".")[2], size)

        def allocate(nbytes: int) -> torch.Tensor:
            nonlocal free
            taken, free = free[:nbytes], free[_aligned(nbytes) :]
            return taken

        found = []
        for row, digest in zip(rows, digests, strict=True):
            parts = [part.read(pause, digest.update, allocate) for part in row]
            try:
                found.append(concatenate(parts))
            except ValueError as error:
                raise UnsupportedModelError(
                    f"{self._checkpoint.source}: {target}: {error}: quantise them alike"
                ) from error
        return found

    def _whole(self, part: TensorSlice, pause: Pause, digest: xxhash.xxh3_64) -> torch.Tensor:
        """Read one expert's tensor into new memory, and add its bytes to the digest."""
        raw = torch.empty(part.nbytes, dtype=torch.uint8)
        part.read_into(raw.numpy().data, pause, digest.update)
        return raw.view(part.dtype).view(part.shape).to(self.dtype)

    def _stack(
        self, name: str, columns: list[list[TensorSlice]], pause: Pause, digests: _Digests
    ) -> torch.Tensor:
        """Stack experts along a new first dimension; an expert's parts lie one below the other.

        Every part is read to its final place, in memory kept under this name for the next chunk, because
        touching new pages takes longer than reading into used ones.
        """
        first = [column[0] for column in columns]
        size = len(columns[0]) * sum(part.nbytes for part in first)
        used = self._buffer(name, size)
        free = used.numpy().data
        for row, digest in zip(zip(*columns, strict=True), digests, strict=True):
            for part in row:
                part.read_into(free[: part.nbytes], pause, digest.update)
                free = free[part.nbytes :]
        rest = first[0].shape if len(first) == 1 else (-1, *first[0].shape[1:])
        return used.view(first[0].dtype).view(len(columns[0]), *rest).to(self.dtype)

    def _buffer(self, name: str, size: int) -> torch.Tensor:
        """Memory of this size, the same for a name in every chunk."""
        buffers = self._buffers[0]
        if name not in buffers or len(buffers[name]) < size:
            buffers[name] = huge_memory(size)
        return buffers[name][:size]


def _aligned(nbytes: int) -> int:
    """Round up, so that every tensor begins where its dtype may."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _quantized(
    source: str, target: str, parts: Sequence[TensorSlice | QuantizedSlice]
) -> list[QuantizedSlice]:
    """Return an expert's parts of a parameter if all are quantised; raise if only some are."""
    found = [part for part in parts if isinstance(part, QuantizedSlice)]
    if len(found) < len(parts):
        raise UnsupportedModelError(
            f"{source}: only some parts of {target} are quantised: quantise all of them alike"
        )
    return found


def _shape(found: torch.Tensor | list[QuantizedMatrix], is_transposed: bool) -> torch.Size:
    """Shape of a parameter for the chunk's experts, in the layout of the model."""
    if isinstance(found, torch.Tensor):
        return found.shape
    shapes = {matrix.shape[::-1] if is_transposed else matrix.shape for matrix in found}
    return torch.Size([len(found), *max(shapes)])


def _only_stacks(rule: Any) -> bool:
    """Whether a rule only stacks experts and concatenates an expert's parts.

    Nearly all of transformers' rules do: they turn (I, H) and (I, H) of each expert into (E, 2I, H).
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    wanted = [(MergeModulelist, 0), (Concatenate, 1)][: len(rule.operations)]
    return [(type(op), getattr(op, "dim", None)) for op in rule.operations] == wanted


def _are_alike(parts: Mapping[str, list[TensorSlice]]) -> bool:
    """Whether all parts have one dtype and differ in their first dimension at most: `_stack` suffices."""
    every = [part for column in parts.values() for part in column]
    return len({(part.get_dtype(), part.shape[1:]) for part in every}) == 1 and all(
        len({part.shape for part in column}) == 1 for column in parts.values()
    )


@contextmanager
def _shrunk(module: nn.Module, shapes: Mapping[str, torch.Size]) -> Iterator[None]:
    """Give a module's parameters a chunk's shapes in the block; some of transformers' rules read them."""
    full = dict(module.named_parameters(recurse=False))
    try:
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=full[name].dtype, device="meta")
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        yield
    finally:
        for name, parameter in full.items():
            module.register_parameter(name, parameter)


def _form(module: Any) -> ExpertForm:
    """Return how a layer's experts compute. `activate` keeps the module, which holds no weights."""
    return ExpertForm(
        has_gate=module.has_gate,
        is_transposed=module.is_transposed,
        activate=module._apply_gate if module.has_gate else module.act_fn,
    )

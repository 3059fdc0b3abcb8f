"""Kernel `triton`: a batch through a layer in three launches, on experts in a GPU's memory.

Requests and results are on the host. Ids are checked and counted there. From then on nothing waits for the
device until the results are there. Sizes of grids depend on shapes alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from triton.errors import TritonError

from eaas.checkpoint.pieces import Pause
from eaas.errors import DeviceFullError
from expert_server.kernels.activation import Activation, recognise
from expert_server.kernels.gpu.batches import Batches, BatchMemory, Prepare
from expert_server.kernels.gpu.cuda import find_device
from expert_server.kernels.gpu.device import Device
from expert_server.kernels.gpu.graphs import GraphKey, Graphs
from expert_server.kernels.gpu.grouping import group_rows
from expert_server.kernels.gpu.memory import batch_bytes, memory_limit
from expert_server.kernels.gpu.packing import DeviceExpert, Layout, check_spec, pack_expert, padded
from expert_server.kernels.gpu.products import combine, down_product, up_product
from expert_server.kernels.gpu.tiles import SUM_COLUMNS, SUM_TOKENS, Tile
from expert_server.kernels.gpu.tuned import tiles_of
from expert_server.kernels.gpu.uploads import Uploads
from expert_server.kernels.kernel import KernelSpec, Sized, UnsupportedError
from expert_server.kernels.slot_kernel import Rows, SlotKernel
from expert_server.kernels.trial import ExpertSizes
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["TritonKernel"]


class TritonKernel(SlotKernel):
    """Computes a batch through a layer on a device (see the module).

    A token's result does not depend on the other tokens of its batch, unless a GPU's tensor cores add up
    small and large tiles in different orders.

    Attributes:
        tiles: Sizes of the tiles of all batches from now on.

    Raises:
        UnsupportedError: The model's activation is unknown, or the weights have a format that this kernel
            lacks.
        ConfigError: There is no GPU.
    """

    name = "triton"
    _packed: dict[tuple[int, int], DeviceExpert]  # type: ignore[assignment]

    def __init__(
        self, forms: Sequence[ExpertForm], spec: KernelSpec, device: Device | None = None
    ) -> None:
        super().__init__(forms, spec)
        coding = check_spec(spec)
        self._activations = {form: _known(form) for form in forms}
        self._device = device or find_device("cuda")
        self.isa = self._device.name
        self.tiles = tiles_of(self._device.name, coding)
        self._uploads = Uploads(self._device)
        self._batches = Batches(self._device)
        self._graphs = Graphs(self._device)
        self._layers: dict[int, dict[int, DeviceExpert]] = {}
        self._tables: dict[int, _Table] = {}

    def unload(self, layer: int, expert: int) -> None:
        """Drop an expert replica, if it is held: later batches lack it. Needs no memory of the device."""
        if self.holds(layer, expert):
            super().unload(layer, expert)
            del self._layers[layer][expert]
            # The device's table keeps the address, so that a full device can unload. The host refuses the id.
            self._tables[layer] = _table(self._layers[layer], self._tables[layer].addresses)

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> DeviceExpert:
        """Copy an expert to the device (`ExpertKernel.pack`).

        Raises:
            CheckpointError: As `ExpertKernel.pack`.
            DeviceFullError: The device has no memory left for it.
            DeviceLostError: The device has failed.
        """
        activation = self._activations[form]
        try:
            return pack_expert(weights.plain(form), activation, self.spec, self._uploads, pause)
        except torch.OutOfMemoryError as error:
            raise self._is_full() from error

    def memory_limit(self, wanted: int, tokens: int, sizes: ExpertSizes, replica: int) -> int:
        """Return the bytes that experts may take (`SlotKernel.memory_limit`)."""
        free = self._device.free_bytes()
        if free is None:
            return wanted
        element = self.spec.dtype.itemsize
        batch = batch_bytes(tokens, sizes.top_k, sizes.hidden, sizes.intermediate, element)
        return memory_limit(self._device.name, wanted, free + self.bytes, batch, replica)

    def pin_slots(self, memory: mmap.mmap) -> None:
        """Page-lock the slots (`SlotKernel.pin_slots`)."""
        self._batches.pin(memory)

    def close(self) -> None:
        """Free the experts, and end the slots' page lock (`ExpertKernel.close`)."""
        super().close()
        self._layers, self._tables = {}, {}
        self._graphs.close()
        self._batches.close()

    @torch.inference_mode()
    def compute(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compute a batch on the device, and wait for it once (`ExpertKernel.compute`)."""
        # On the wire ids have 32 bits. Others must not wrap round to another expert's.
        ids = ids_TK.numpy()
        is_wide = ids != ids.astype(np.int32)
        if is_wide.any():
            raise self._not_held(layer, int(ids[is_wide][0]))
        requests = [(x_TH, ids_TK, scores_TK)]
        prepare = self._join(requests, layer)
        # A copy: the result is in memory of the next batch.
        out_TH = None if prepare is None else self._batches.run(requests, prepare)
        return torch.zeros(x_TH.shape) if out_TH is None else out_TH.clone()

    @torch.inference_mode()
    def compute_slots(
        self, requests: Sequence[Rows], results: Sequence[torch.Tensor], layer: int
    ) -> None:
        """Compute a batch from slot to slot, and wait for it once (`SlotKernel.compute_slots`)."""
        prepare = self._join(requests, layer)
        if prepare is not None:
            self._batches.run(requests, prepare, results)
            return
        for result_TH in results:
            result_TH.zero_()

    @torch.inference_mode()
    def issue(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Issue a batch that is on the device, in the current stream and without a graph; for benchmarks.

        Nothing is checked, counted or waited for: all experts must be held until the batch has ended.

        Returns:
            (T, H) float32 on the device, which need not be there yet.
        """
        table = self._tables[layer]
        assert table.layout is not None
        assert table.addresses is not None
        (tokens, top_k), hidden = ids_TK.shape, x_TH.shape[1]
        memory = BatchMemory.allocate(self._device, tokens, top_k, hidden, x_TH.dtype)
        memory.x_TH.copy_(x_TH)
        memory.ids_TK.copy_(ids_TK)
        memory.scores_TK.copy_(scores_TK)
        activation = self._activations[self.forms[layer]]
        tile = self.tiles.choose(tokens * top_k, len(table.addresses))
        self._launch(table.layout, activation, tile, memory, table.addresses)
        return memory.out_TH

    def _join(self, requests: Sequence[Rows], layer: int) -> Prepare | None:
        """Join and check the ids of a batch; return what prepares it, or None if it has no expert.

        Raises:
            LookupError: An expert is not held.
            ValueError: The hidden size is another one.
        """
        # `prepare` holds this table, so an expert that is unloaded meanwhile keeps its memory until the end.
        table = self._tables.get(layer, _NO_EXPERTS)
        tokens = self._graphs.tokens(sum(len(ids) for _, ids, _ in requests))
        ids = self._check(self._batches.join_routes(requests, tokens), table, layer)
        layout, x_TH = table.layout, requests[0][0]
        if layout is not None and x_TH.shape[1] != layout.hidden:
            raise ValueError(f"x {tuple(x_TH.shape)}: the experts' hidden size is {layout.hidden}")
        if layout is None or not (ids >= 0).any():
            return None
        activation = self._activations[self.forms[layer]]
        shape = tokens, requests[0][1].shape[1], layout.hidden
        return partial(self._prepare, table, layout, activation, shape, x_TH.dtype)

    def _prepare(
        self,
        table: _Table,
        layout: Layout,
        activation: Activation,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> tuple[BatchMemory, Callable[[], None]]:
        """Return memory for a batch of (T, K, H), and what issues it: a graph's if it has one."""
        assert table.addresses is not None
        tile = self.tiles.choose(shape[0] * shape[1], len(table.addresses))
        issue = partial(self._launch, layout, activation, tile)
        places = self._graphs.places(len(table.addresses))
        key = GraphKey(*shape, dtype, places, (layout, activation, tile))
        graph = self._graphs.get(key, issue)
        if graph is not None:
            return graph.memory, partial(graph.issue, table.addresses)
        memory = BatchMemory.allocate(self._device, *shape, dtype)
        return memory, partial(issue, memory, table.addresses)

    def _launch(
        self,
        layout: Layout,
        activation: Activation,
        tile: Tile,
        memory: BatchMemory,
        addresses: torch.Tensor,
    ) -> None:
        """Issue a batch that is on the device, on the experts at these addresses; writes `memory.out_TH`.

        Raises:
            RuntimeError: The device code cannot be compiled, or takes more than the device has.
        """
        try:
            self._launch_each(layout, activation, tile, memory, addresses)
        except TritonError as error:
            # No RuntimeError by itself, so that the loop would not refuse the batch but end.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _launch_each(
        self,
        layout: Layout,
        activation: Activation,
        tile: Tile,
        memory: BatchMemory,
        addresses: torch.Tensor,
    ) -> None:
        x_TH, out_TH = memory.x_TH, memory.out_TH
        ids, scores = memory.ids_TK, memory.scores_TK
        (tokens, hidden), top_k = x_TH.shape, ids.shape[1]
        intermediate, empty = layout.intermediate, self._device.empty
        # So that the sum is exact: see `eaas.wire.slot`.
        y_dtype = torch.bfloat16 if x_TH.dtype is torch.bfloat16 else torch.float32
        x = x_TH.to(self.spec.dtype)
        if hidden != padded(hidden):
            x = functional.pad(x, (0, padded(hidden) - hidden))
        rows = ids.numel()
        experts = len(addresses)
        groups = group_rows(ids, experts, tile.rows)
        tiled = groups.expert_M, groups.start_M, groups.end_M, groups.order
        h = empty(rows, padded(intermediate), dtype=self.spec.dtype)
        y = empty(rows, hidden, dtype=y_dtype)
        up, down, up_scales, down_scales, up_bias, down_bias = layout.offsets
        shape = {
            "CODING": int(layout.coding),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "STEP": self.tiles.step,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": True,
        }
        up_product[len(groups.expert_M), -(-h.shape[1] // tile.columns)](
            x, h, addresses, *tiled,
            intermediate, x.shape[1], h.shape[1], top_k,
            up, up_scales, up_bias, layout.group or x.shape[1],
            HAS_BIAS=layout.has_bias[0], KIND=int(activation.kind), HAS_GATE=activation.has_gate,
            ALPHA=activation.alpha, LIMIT=activation.limit, **shape,
        )  # fmt: skip
        down_product[len(groups.expert_M), -(-hidden // tile.columns)](
            h, y, addresses, *tiled, scores,
            hidden, h.shape[1],
            down, down_scales, down_bias, layout.group or h.shape[1],
            HAS_BIAS=layout.has_bias[1], **shape,
        )  # fmt: skip
        combine[-(-tokens // SUM_TOKENS), -(-hidden // SUM_COLUMNS)](
            y,
            ids,
            out_TH,
            tokens,
            hidden,
            top_k,
            TOKENS=SUM_TOKENS,
            COLUMNS=SUM_COLUMNS,
            enable_fp_fusion=True,
        )

    def _check(
        self, ids: npt.NDArray[np.integer], table: _Table, layer: int
    ) -> npt.NDArray[np.integer]:
        """Check that the experts of a batch are held, and count its rows. Raises LookupError."""
        experts = len(table.held) - 1
        is_held = (ids >= -1) & (ids < experts)
        # -1 is the last place, which counts as held.
        is_held[is_held] = table.held[ids[is_held]]
        if not is_held.all():
            raise self._not_held(layer, int(ids[~is_held][0]))
        if self._counts_LX is not None:
            count_E = np.bincount(ids + 1, minlength=1 + experts)[1:]
            self._counts_LX[layer, 0] += np.count_nonzero(count_E)
            self._counts_LX[layer, 1 : 1 + experts] += count_E
        return ids

    def _put(self, layer: int, expert: int, packed: Sized) -> None:
        assert isinstance(packed, DeviceExpert)
        held = self._layers.get(layer, {}) | {expert: packed}
        # First what can fail: if it does, nothing has changed.
        table = _table(held, self._addresses(held))
        super()._put(layer, expert, packed)
        self._layers[layer], self._tables[layer] = held, table

    def _addresses(self, held: dict[int, DeviceExpert]) -> torch.Tensor:
        addresses = torch.zeros(max(held) + 1, dtype=torch.int64)
        for expert, packed in held.items():
            addresses[expert] = packed.memory.data_ptr()
        try:
            with self._device.loading():
                on_device = self._device.empty(len(addresses), dtype=torch.int64)
                self._uploads.write(on_device.view(torch.uint8), addresses.view(torch.uint8))
        except torch.OutOfMemoryError as error:
            raise self._is_full() from error
        return on_device

    def _is_full(self) -> DeviceFullError:
        return DeviceFullError(
            f"{self._device.name} has no memory left for it: set expert_server.memory_bytes below what "
            "is free, or add servers"
        )


@dataclass(frozen=True, eq=False)
class _Table:
    """A layer's experts as the device reads them; replaced, never changed. A call keeps it to its end.

    Attributes:
        held: Whether each expert is held; one more place, for -1, says yes.
        addresses: (E) addresses of the experts' blocks, on the device; 0 for those that are not held.
        memory: The blocks.
        layout: Of all blocks; None if there are none.
    """

    held: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones(1, np.bool_))
    addresses: torch.Tensor | None = None
    memory: tuple[torch.Tensor, ...] = ()
    layout: Layout | None = None


_NO_EXPERTS = _Table()


def _table(held: dict[int, DeviceExpert], addresses: torch.Tensor | None) -> _Table:
    is_held = np.zeros(1 + (0 if addresses is None else len(addresses)), np.bool_)
    is_held[[*held, -1]] = True
    layouts = {packed.layout for packed in held.values()}  # one at most
    return _Table(is_held, addresses, tuple(packed.memory for packed in held.values()), *layouts)


def _known(form: ExpertForm) -> Activation:
    activation = recognise(form)
    if activation is None:
        raise UnsupportedError("this kernel does not know the model's activation")
    return activation

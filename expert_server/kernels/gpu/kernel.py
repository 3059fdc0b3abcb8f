"""Kernel `triton`: a batch through a layer in three launches, on experts in a GPU's memory.

Requests and results are on the host. Ids are checked and counted there. From then on nothing waits for the
device until the results are there.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from eaas.checkpoint.pieces import Pause
from expert_server.kernels.activation import Activation, recognise
from expert_server.kernels.gpu.batches import Batches, BatchMemory
from expert_server.kernels.gpu.device import Device, Uploads, find_device
from expert_server.kernels.gpu.graphs import Graphs
from expert_server.kernels.gpu.launches import Program, launch
from expert_server.kernels.gpu.memory import batch_bytes, memory_limit
from expert_server.kernels.gpu.packing import DeviceExpert, check_spec, pack_expert
from expert_server.kernels.gpu.tiles import bucket_of, tiles_of
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
        tiles: Sizes of the tiles of all batches from now on, by bucket (`tiles.bucket_of`).

    Raises:
        UnsupportedError: The model's activation is unknown, or the weights have a format that this kernel
            lacks.
        ConfigError: There is no GPU.
    """

    name = "triton"

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
        self._tables: dict[int, _Table] = {}

    def unload(self, layer: int, expert: int) -> None:
        """Drop an expert replica, if it is held: later batches lack it. Needs no memory of the device."""
        if self.holds(layer, expert):
            super().unload(layer, expert)
            table = self._tables[layer]
            held = {other: each for other, each in table.experts.items() if other != expert}
            # The device's table keeps the address, so that a full device can unload. The host refuses the id.
            self._tables[layer] = _Table(held, table.addresses)

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> DeviceExpert:
        """Copy an expert to the device (`ExpertKernel.pack`).

        Raises:
            CheckpointError: As `ExpertKernel.pack`.
            DeviceFullError: The device has no memory left for it.
            DeviceLostError: The device has failed.
        """
        activation = self._activations[form]
        return pack_expert(weights.plain(form), activation, self.spec, self._uploads, pause)

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
        self._tables = {}
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
        out_TH = torch.empty(x_TH.shape)
        self._run([(x_TH, ids_TK, scores_TK)], [out_TH], layer, are_pinned=False)
        return out_TH

    @torch.inference_mode()
    def compute_slots(
        self, requests: Sequence[Rows], results: Sequence[torch.Tensor], layer: int
    ) -> None:
        """Compute a batch from slot to slot, and wait for it once (`SlotKernel.compute_slots`)."""
        self._run(requests, results, layer, self._batches.is_pinned)

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
        shape = *ids_TK.shape, x_TH.shape[1]
        memory = BatchMemory.allocate(self._device, shape, x_TH.dtype)
        memory.x_TH.copy_(x_TH)
        memory.ids_TK.copy_(ids_TK)
        memory.scores_TK.copy_(scores_TK)
        launch(self._program(table, layer, ids_TK.numel()), memory, table.addresses)
        return memory.out_TH

    def _run(
        self,
        requests: Sequence[Rows],
        results: Sequence[torch.Tensor],
        layer: int,
        are_pinned: bool,
    ) -> None:
        """Compute a batch into its results; `are_pinned`: requests and results are in the slots.

        Raises:
            LookupError: An expert is not held.
            ValueError: The hidden size is another one.
        """
        # Kept to the end, so that an expert that is unloaded meanwhile keeps its memory.
        table = self._tables.get(layer)
        tokens = self._graphs.tokens(sum(len(ids_TK) for _, ids_TK, _ in requests))
        ids = self._batches.join_routes(requests, tokens)
        self._check(ids, _NONE_HELD if table is None else table.is_held, layer)
        x_TH, ids_TK, _ = requests[0]
        if table is None or not (ids >= 0).any():
            for result_TH in results:
                result_TH.zero_()
            return
        program = self._program(table, layer, len(ids))
        shape = tokens, ids_TK.shape[1], program.layout.hidden
        if x_TH.shape[1] != shape[2]:
            raise ValueError(f"x {tuple(x_TH.shape)}: the experts' hidden size is {shape[2]}")
        prepare = partial(self._graphs.prepare, program, shape, x_TH.dtype, table.addresses)
        self._batches.run(requests, results, prepare, are_pinned)

    def _program(self, table: _Table, layer: int, rows: int) -> Program:
        """Return what computes a batch of so many rows."""
        # All blocks of a layer have one layout.
        layout = next(iter(table.experts.values())).layout
        tile = self.tiles[bucket_of(rows, len(table.addresses))]
        return Program(layout, self._activations[self.forms[layer]], tile)

    def _check(self, ids: npt.NDArray[np.integer], held: npt.NDArray[np.bool_], layer: int) -> None:
        """Check that the experts of a batch are held, and count its rows. Raises LookupError."""
        experts = len(held) - 1
        is_held = (ids >= -1) & (ids < experts)
        is_held[is_held] = held[ids[is_held]]
        if not is_held.all():
            raise self._not_held(layer, int(ids[~is_held][0]))
        if self._counts_LX is not None:
            count_E = np.bincount(ids + 1, minlength=1 + experts)[1:]
            self._counts_LX[layer, 0] += np.count_nonzero(count_E)
            self._counts_LX[layer, 1 : 1 + experts] += count_E

    def _put(self, layer: int, expert: int, packed: Sized) -> None:
        assert isinstance(packed, DeviceExpert)
        before = self._tables.get(layer)
        held = {**(before.experts if before is not None else {}), expert: packed}
        addresses = torch.zeros(max(held) + 1, dtype=torch.int64)
        for number, each in held.items():
            addresses[number] = each.memory.data_ptr()
        # First what can fail: if it does, nothing has changed.
        with self._uploads.load():
            on_device = self._device.empty(len(addresses), dtype=torch.int64)
            self._uploads.write(on_device.view(torch.uint8), addresses.view(torch.uint8))
        super()._put(layer, expert, packed)
        self._tables[layer] = _Table(held, on_device)


class _Table:
    """A layer's experts as the device reads them; replaced, never changed. A call keeps it to its end.

    Attributes:
        experts: Those that are held, with their memory.
        addresses: (E) addresses of the experts' blocks, on the device; of those that are not held anything.
        is_held: Whether each expert is held; one more place, for -1, says yes.
    """

    def __init__(self, experts: Mapping[int, DeviceExpert], addresses: torch.Tensor) -> None:
        self.experts, self.addresses = experts, addresses
        self.is_held = np.zeros(len(addresses) + 1, np.bool_)
        self.is_held[[*experts, -1]] = True


_NONE_HELD = np.ones(1, np.bool_)


def _known(form: ExpertForm) -> Activation:
    activation = recognise(form)
    if activation is None:
        raise UnsupportedError("this kernel does not know the model's activation")
    return activation

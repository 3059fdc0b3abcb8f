"""Kernel `triton`: a batch through a layer in three launches, on experts in a GPU's memory.

The loop's tensors are on the host. Their ids are checked and counted there. From then on nothing waits for
the device until the result is copied back. Sizes of grids depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from eaas.checkpoint.pieces import Pause
from expert_server.kernels.activation import Activation, recognise
from expert_server.kernels.gpu.device import Device, find_device
from expert_server.kernels.gpu.grouping import group_rows
from expert_server.kernels.gpu.packing import DeviceExpert, Layout, check_spec, pack_expert, padded
from expert_server.kernels.gpu.products import combine, down_product, up_product
from expert_server.kernels.gpu.tiles import SUM_COLUMNS, SUM_TOKENS, TILES
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Sized, UnsupportedError
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["TritonKernel"]


class TritonKernel(ExpertKernel):
    """Computes a batch through a layer on a device (see the module).

    A token's result does not depend on the other tokens of its batch, unless a GPU's tensor cores add up
    small and large tiles in different orders.

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
        check_spec(spec)
        self._activations = {form: _known(form) for form in forms}
        self._device = device or find_device("cuda")
        self.isa = self._device.name
        self._layers: dict[int, dict[int, DeviceExpert]] = {}
        self._tables: dict[int, _Table] = {}

    def unload(self, layer: int, expert: int) -> None:
        """Drop an expert replica, if it is held; later calls get a table of the layer without it."""
        if self.holds(layer, expert):
            super().unload(layer, expert)
            del self._layers[layer][expert]
            self._publish(layer)

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> DeviceExpert:
        """Copy an expert to the device (`ExpertKernel.pack`)."""
        activation = self._activations[form]
        return pack_expert(weights.plain(form), activation, self.spec, self._device, pause)

    def close(self) -> None:
        """Free the experts (`ExpertKernel.close`)."""
        super().close()
        self._layers, self._tables = {}, {}

    @torch.inference_mode()
    def compute(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compute a batch on the device, and wait for it once (`ExpertKernel.compute`)."""
        # The call holds this table, so an expert that is unloaded meanwhile keeps its memory until the end.
        table = self._tables.get(layer, _NO_EXPERTS)
        ids = self._check(ids_TK.numpy().reshape(-1), table, layer)
        layout = table.layout
        if layout is not None and x_TH.shape[1] != layout.hidden:
            raise ValueError(f"x {tuple(x_TH.shape)}: the experts' hidden size is {layout.hidden}")
        if layout is None or not (ids >= 0).any():
            return torch.zeros(x_TH.shape)
        with self._device.batch():
            return self._device.receive(
                self._launch(x_TH, ids_TK, scores_TK, table, layout, self.forms[layer])
            )

    def _launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        table: _Table,
        layout: Layout,
        form: ExpertForm,
    ) -> torch.Tensor:
        """Issue a batch; returns (T, H) float32 on the device, which need not be there yet."""
        (tokens, hidden), top_k = x_TH.shape, ids_TK.shape[1]
        intermediate, device = layout.intermediate, self._device.at
        # So that the sum is exact: see `eaas.wire.slot`.
        y_dtype = torch.bfloat16 if x_TH.dtype is torch.bfloat16 else torch.float32
        wide_TH = functional.pad(x_TH.to(self.spec.dtype), (0, padded(hidden) - hidden))
        x, ids, scores = map(
            self._device.send,
            (wide_TH.contiguous(), ids_TK.int().contiguous(), scores_TK.float().contiguous()),
        )
        rows = ids.numel()
        experts = len(table.held) - 1
        tiles = TILES[layout.coding]
        tile = tiles.choose(rows, experts)
        groups = group_rows(ids, experts, tile.rows)
        tiled = groups.expert_M, groups.start_M, groups.end_M, groups.order
        h = torch.empty(rows, padded(intermediate), dtype=self.spec.dtype, device=device)
        y = torch.empty(rows, hidden, dtype=y_dtype, device=device)
        out_TH = torch.empty(tokens, hidden, device=device)
        activation = self._activations[form]
        up, down, up_scales, down_scales, up_bias, down_bias = layout.offsets
        shape = {
            "CODING": int(layout.coding),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "STEP": tiles.step,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": True,
        }
        up_product[len(groups.expert_M), -(-h.shape[1] // tile.columns)](
            x, h, table.addresses, *tiled,
            intermediate, x.shape[1], h.shape[1], top_k,
            up, up_scales, up_bias, layout.group or x.shape[1],
            HAS_BIAS=layout.has_bias[0], KIND=int(activation.kind), HAS_GATE=activation.has_gate,
            ALPHA=activation.alpha, LIMIT=activation.limit, **shape,
        )  # fmt: skip
        down_product[len(groups.expert_M), -(-hidden // tile.columns)](
            h, y, table.addresses, *tiled, scores,
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
        return out_TH

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
        super()._put(layer, expert, packed)
        self._layers.setdefault(layer, {})[expert] = packed
        self._publish(layer)

    def _publish(self, layer: int) -> None:
        held = self._layers[layer]
        is_held = np.zeros(max(held, default=-1) + 2, np.bool_)
        is_held[-1] = True
        addresses = torch.zeros(len(is_held) - 1, dtype=torch.int64)
        for expert, packed in held.items():
            is_held[expert], addresses[expert] = True, packed.memory.data_ptr()
        with self._device.loading():
            on_device = torch.empty_like(addresses, device=self._device.at)
            self._device.write(on_device, addresses)
        layouts = {packed.layout for packed in held.values()}  # one at most
        memory = tuple(packed.memory for packed in held.values())
        self._tables[layer] = _Table(is_held, on_device, memory, *layouts)


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


def _known(form: ExpertForm) -> Activation:
    activation = recognise(form)
    if activation is None:
        raise UnsupportedError("this kernel does not know the model's activation")
    return activation

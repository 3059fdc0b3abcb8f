"""An expert server's compiled kernel: a batch through a layer in one call, on panels read strictly forward.

One extension has code for each CPU (AMX, AVX512-BF16, VNNI, AVX-512, AVX2, any other) and takes the first
that works. `native/native.h` and `native/moe.c` describe the layout and the order of work.

Bit for bit, a token's result depends only on the token, its experts and its scores. It does not depend on the
other tokens of the batch, its place in the batch, or the number of threads. With bfloat16 tokens it does not
depend on the division of the experts among servers either (`eaas.wire.slot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from eaas.checkpoint.pieces import Pause
from eaas.memory import HugeBlocks, huge_memory
from expert_server.kernels import _native
from expert_server.kernels.activation import Activation, recognise
from expert_server.kernels.kernel import (
    ExpertKernel,
    KernelSpec,
    Sized,
    UnsupportedError,
)
from expert_server.kernels.panels import PackedExpert, pack_expert, panel_format
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["NativeKernel", "available_isas"]

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
# Rows of the largest request that compiled code accepts (MOST_PAIRS of slots.h). Rows that no batch has take
# no memory.
_DIRECT_ROWS = 1 << 16
# Whether a pool learns which batches are too small for its threads (pool.c); if not, all of them compute all.
_LEARNS = True
# Mirrors `Expert` in native.h.
_EXPERT = np.dtype([(name, "u8") for name in ("up", "down", "up_bias", "down_bias", "up_order")])


class NativeKernel(ExpertKernel):
    """Computes a batch through a layer in compiled code (see the module).

    Raises:
        UnsupportedError: The model's activation is unknown, the dtype is neither float32 nor bfloat16, or no
            panels hold the checkpoint's quantised weights.
    """

    name = "native"
    _packed: dict[tuple[int, int], PackedExpert]  # type: ignore[assignment]

    def __init__(
        self, forms: Sequence[ExpertForm], spec: KernelSpec, isa: str | None = None
    ) -> None:
        super().__init__(forms, spec)
        self._activations = {form: _known(form) for form in forms}
        wanted = panel_format(spec)
        # Rows of integers have 15 bits, more than bfloat16 and less than float32: on request only.
        only_exact = spec.dtype is torch.float32 and isa is None
        kinds = [
            kind
            for kind in _native.kinds()
            if kind[2] == wanted
            and isa in (None, kind[1])
            and not (only_exact and kind[3] != _FORMATS[torch.float32])
        ]
        if not kinds:
            raise UnsupportedError(f"this CPU has no {isa}")
        self._kind, self.isa, _, _ = kinds[0]
        self._pool = _native.create_pool(spec.threads, _LEARNS)
        self._blocks = HugeBlocks()
        self._layers: dict[int, dict[int, PackedExpert]] = {}
        self._tables: dict[int, _Table] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._out = self._out_TH = torch.empty(0)
        self._prepared: list[object | None] = [None] * len(self.forms)
        self.direct = self._prepared
        self._direct_scratch = torch.empty(0, dtype=torch.uint8)

    def count_into(self, counts_LX: npt.NDArray[np.int64]) -> None:
        """Count the tokens of each expert, also in the prepared layers (`ExpertKernel.count_into`)."""
        super().count_into(counts_LX)
        for layer in self._tables:
            self._publish(layer)

    def unload(self, layer: int, expert: int) -> None:
        """Drop an expert replica, if it is held; later calls get a table of the layer without it."""
        if self.holds(layer, expert):
            super().unload(layer, expert)
            del self._layers[layer][expert]
            self._publish(layer)

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> PackedExpert:
        """Pack an expert into panels, which the compiled code reads (`ExpertKernel.pack`)."""
        return pack_expert(
            weights.plain(form), self._activations[form], self.spec, pause, self._blocks.allocate
        )

    def close(self) -> None:
        """Free the thread pool, the experts and the scratch memory, for good (`ExpertKernel.close`)."""
        super().close()
        self._layers, self._tables = {}, {}
        self._blocks = HugeBlocks()
        self._prepared[:] = [None] * len(self.forms)
        self._direct_scratch = torch.empty(0, dtype=torch.uint8)
        self._pool = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._out = self._out_TH = torch.empty(0)

    def compute(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compute a batch in one call of the compiled code (`ExpertKernel.compute`)."""
        table = self._tables.get(layer, _NO_EXPERTS)
        (tokens, hidden), top_k = x_TH.shape, ids_TK.shape[1]
        if not table.memory:
            # I is unknown: either no expert is requested, or the first id is missing.
            asked = ids_TK[ids_TK != -1]
            if len(asked):
                raise self._not_held(layer, int(asked[0]))
            return torch.zeros(tokens, hidden)
        if hidden != table.size[0]:
            raise ValueError(f"x {tuple(x_TH.shape)}: the experts' hidden size is {table.size[0]}")
        # Other dtypes are rare, and even a torch call that does nothing takes 20 us.
        x_TH = _contiguous(x_TH, torch.bfloat16, torch.float32)
        ids_TK = _contiguous(ids_TK, torch.int32, torch.int64)
        scores_TK = _contiguous(scores_TK, torch.float32)
        size = (*table.size, tokens, top_k, len(table.experts))
        self._reserve(_native.scratch_bytes(self._kind, self.spec.threads, *size), tokens, hidden)
        missing = _native.run(
            self._common(layer, table),
            (x_TH.data_ptr(), _FORMATS[x_TH.dtype]),
            (ids_TK.data_ptr(), ids_TK.dtype is torch.int64),
            scores_TK.data_ptr(),
            tokens,
            top_k,
            self._out_TH.data_ptr(),
            self._scratch.data_ptr(),
        )
        if missing != -1:
            raise self._not_held(layer, missing)
        return self._out_TH

    def _put(self, layer: int, expert: int, packed: Sized) -> None:
        assert isinstance(packed, PackedExpert)
        super()._put(layer, expert, packed)
        self._layers.setdefault(layer, {})[expert] = packed
        self._publish(layer)

    def _publish(self, layer: int) -> None:
        held = self._layers[layer]
        experts = np.zeros(max(held, default=-1) + 1, _EXPERT)
        for expert, packed in held.items():
            experts[expert] = packed.addresses
        sizes = {packed.size for packed in held.values()}  # one at most
        table = _Table(experts, tuple(packed.memory for packed in held.values()), *sizes)
        self._tables[layer] = table
        self._prepared[layer] = self._prepare(layer, table) if held else None

    def _prepare(self, layer: int, table: _Table) -> object | None:
        """Make what the loop's compiled code calls for this layer; it keeps the table, as a call does.

        None if there is no memory: calls from Python then report it.
        """
        needed = _native.scratch_bytes(
            self._kind, self.spec.threads, *table.size, _DIRECT_ROWS, 1, len(table.experts)
        )
        if self._direct_scratch.nbytes < needed:
            try:
                self._direct_scratch = huge_memory(needed)
            except OSError:
                return None
        scratch = self._direct_scratch
        owners = (table, scratch, self._counts_LX)
        place = scratch.data_ptr(), scratch.nbytes
        return _native.prepare(self._common(layer, table), place, owners)

    def _common(self, layer: int, table: _Table) -> _native.Layer:
        """What all calls of a layer have in common."""
        form = self._activations[self.forms[layer]]
        activation = form.kind, form.has_gate, form.alpha, form.limit
        counts = 0 if self._counts_LX is None else int(self._counts_LX[layer].ctypes.data)
        experts = table.address, len(table.experts)
        return self._kind, self._pool, *experts, *table.size, activation, counts

    def _reserve(self, scratch_bytes: int, tokens: int, hidden: int) -> None:
        """Grow scratch and result memory of all calls, by more than needed, so that later ones rarely do."""
        if self._scratch.nbytes < scratch_bytes:
            self._scratch = torch.empty(0, dtype=torch.uint8)
            self._scratch = huge_memory(scratch_bytes + scratch_bytes // 2)
        if self._out_TH.shape == (tokens, hidden):
            return
        values = tokens * hidden
        if len(self._out) < values:
            self._out = self._out_TH = torch.empty(0)
            self._out = huge_memory(8 * values).view(torch.float32)
        self._out_TH = self._out[:values].view(tokens, hidden)


@dataclass(frozen=True, eq=False)
class _Table:
    """A layer's experts as the compiled code reads them; replaced, never changed.

    A call keeps its table, and with it the experts' memory. An expert that is unloaded during a call is freed
    when the call ends.
    """

    experts: np.ndarray
    memory: tuple[torch.Tensor, ...]
    size: tuple[int, int] = (0, 0)

    @cached_property
    def address(self) -> int:
        """Memory address of `experts`, for the compiled code."""
        return int(self.experts.ctypes.data)


_NO_EXPERTS = _Table(np.zeros(0, _EXPERT), ())


def available_isas(spec: KernelSpec) -> list[str]:
    """List the instruction sets that work on this CPU for such weights, the fastest first; for tests."""
    return [isa for _, isa, weights, _ in _native.kinds() if weights == panel_format(spec)]


def _contiguous(values: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """Return values that the compiled code reads: contiguous, of one of these dtypes (else the last)."""
    if values.dtype not in dtypes:
        values = values.to(dtypes[-1])
    return values if values.is_contiguous() else values.contiguous()


def _known(form: ExpertForm) -> Activation:
    activation = recognise(form)
    if activation is None:
        raise UnsupportedError("this kernel does not know the model's activation")
    return activation

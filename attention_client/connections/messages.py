"""A client's data types of a request to an expert server: its input, its ticket and its answer.

Letters: T tokens, R tokens of a part, H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eaas.errors import WrongRequestError
from eaas.wire import ResultHeader
from eaas.wire.slot import WireDtype

__all__ = ["WIRE_DTYPES", "Answer", "LayerInput", "Ticket"]

WIRE_DTYPES = {
    torch.float32: WireDtype.FLOAT32,
    torch.bfloat16: WireDtype.BFLOAT16,
    torch.float16: WireDtype.FLOAT16,
}


@dataclass(eq=False, slots=True)
class LayerInput:
    """Inputs of one MoE layer call, shared by its requests to all servers; made by `of`.

    Attributes:
        layer: MoE layer.
        x_TH: Hidden states; bfloat16 is viewed as uint16, because NumPy lacks it.
        dtype: Dtype of the hidden states.
        scores_TK: float32.
    """

    layer: int
    x_TH: npt.NDArray[Any]
    dtype: WireDtype
    scores_TK: npt.NDArray[np.float32]

    @classmethod
    def of(cls, layer: int, x_TH: torch.Tensor, scores_TK: npt.NDArray[np.float32]) -> LayerInput:
        """Make a call's inputs, as they go over the wire, from hidden states on the CPU.

        Raises:
            WrongRequestError: The wire format lacks the dtype.
        """
        try:
            dtype = WIRE_DTYPES[x_TH.dtype]
        except KeyError:
            raise WrongRequestError(
                f"hidden states in {x_TH.dtype}, the wire has {[*WIRE_DTYPES]}"
            ) from None
        # The compiled verbs need contiguous arrays.
        raw = x_TH.contiguous()
        raw = raw.view(torch.uint16) if dtype is WireDtype.BFLOAT16 else raw
        return cls(layer, raw.numpy(), dtype, np.ascontiguousarray(scores_TK))


@dataclass(eq=False, slots=True)
class Ticket:
    """Handle of a request in flight: its slot, its id (the answer repeats it), its tokens and its work."""

    slot: int
    request_id: int
    rows: int
    work: float


@dataclass(eq=False, slots=True)
class Answer:
    """An expert server's answer to a request, in its slot.

    Attributes:
        header: Status, detail and the server's own service time.
        part_RH: float32 (R, H), a view of the slot: valid if `release` returns True afterwards. None if the
            status is not OK; then the slot is free already.
    """

    header: ResultHeader
    part_RH: npt.NDArray[np.float32] | None

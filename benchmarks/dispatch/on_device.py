"""A layer call whose tensors are on a GPU, to a server that computes nothing.

The copies are those of the engines (`attention_client.engines.staging`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention_client.engines.staging import Staging
from benchmarks.dispatch.caller import Caller, Request

__all__ = ["call_from"]


def call_from(at: torch.device, caller: Caller, request: Request) -> Callable[[], torch.Tensor]:
    """Return what makes a layer call for a request's tensors on a device.

    It ends when the result, (T, H), is on the device.
    """
    tensors = [
        tensor.to(at)
        for tensor in (
            request.x_TH,
            torch.from_numpy(request.ids_TK),
            torch.from_numpy(request.scores_TK),
        )
    ]
    staging = Staging()
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def call() -> torch.Tensor:
        staged = staging.to_host(*tensors)
        result_TH = staged.to_device(caller.layer_call_of(*staged.tensors))
        arrived.record()
        arrived.synchronize()
        return result_TH

    return call

"""The direct path of an expert server's loop: a request that is alone is answered in compiled code.

For one token, the loop's Python takes several times as long as a small layer. So compiled code (`_direct.c`)
validates a request that would be a batch of its own, computes it in its slot, and answers it. While no batch
ever waits for others (`Policy.never_waits`), it also waits for the requests: then no Python runs between two
of them. All other requests take the ordinary path.
"""

from __future__ import annotations

from eaas.wire import Arena
from eaas.wire.slot import SlotLimits
from expert_server.kernels import ExpertKernel
from expert_server.loop._direct import Direct
from expert_server.transports.slot_ownership import SlotTable

__all__ = ["create_direct"]


def create_direct(
    arena: Arena, table: SlotTable, kernel: object, limits: SlotLimits
) -> Direct | None:
    """Make the direct path to a kernel's prepared layers; None if it has none, or is not one of ours."""
    layers = kernel.direct if isinstance(kernel, ExpertKernel) else None
    if layers is None:
        return None
    flags, bells, _, slots = arena.offsets
    return Direct(
        arena.buffer,
        arena.slots,
        (flags, bells, slots),
        (arena.request_stride, arena.result_stride),
        limits,
        layers,
        table.owners,
    )

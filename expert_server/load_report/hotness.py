"""Reports an expert server's load to the balancer: tokens per expert, busy time, network traffic."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape
from expert_server.experts.store import ExpertStore
from expert_server.loop.loop import ServeLoop

__all__ = ["HotnessHandler", "carried"]

_INTERFACES = Path("/proc/net/dev")  # proc_net_dev(5)
_LOOPBACK = "lo"
# Columns after an interface's name.
_RECEIVED, _SENT = 0, 8


class HotnessHandler:
    """Serves `ReadHotness` of `expert.proto` to the balancer. Thread-safe.

    The kernel adds to the totals while they are read. Each number is right as of some moment, and later
    tokens are in the next answer.

    Args:
        shape: The model's shape.
        loop: Reports its busy time, and whether requests were answered since the last call.
        store: Reports the number and size of the replicas held.

    Attributes:
        counts_LX: int64 (L, 1 + E), for the kernel to add to (see `ExpertKernel.count_into`).
    """

    CALLS: ClassVar = ("ReadHotness",)

    def __init__(self, shape: ModelShape, loop: ServeLoop, store: ExpertStore) -> None:
        self.counts_LX: npt.NDArray[np.int64] = np.zeros(
            (shape.num_layers, 1 + shape.num_experts), np.int64
        )
        self._loop = loop
        self._store = store
        self._boot_id = secrets.randbits(62) | 1

    def ReadHotness(self, request: pb.ReadHotnessRequest, context: Any) -> pb.ReadHotnessResponse:
        """Return the total tokens of each expert, busy time and traffic; the balancer plans with them.

        The tokens are left out if no request was answered since the balancer's last call.
        """
        # Before the counts: the next answer repeats tokens that come between the two, rather than omit them.
        sequence, busy_s, batches = self._loop.requests, self._loop.busy_s, self._loop.batches
        known = (request.boot_id, request.sequence) == (self._boot_id, sequence)
        visits_L, tokens_LE = self.counts_LX[:, 0], self.counts_LX[:, 1:]
        received, sent = carried(_INTERFACES.read_text())
        return pb.ReadHotnessResponse(
            boot_id=self._boot_id,
            sequence=sequence,
            layers=()
            if known
            else [common_pb2.LayerTokens(tokens=row) for row in tokens_LE.tolist()],
            busy_s=busy_s,
            batches=batches,
            visits=int(visits_L.sum()),
            expert_bytes=self._store.expert_bytes,
            received_bytes=received,
            sent_bytes=sent,
        )


def carried(table: str) -> tuple[int, int]:
    """Sum the bytes received and sent by all interfaces in /proc/net/dev except lo, for ReadHotness."""
    received = sent = 0
    # Skip two heading lines.
    for line in table.splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != _LOOPBACK:
            columns = rest.split()
            received += int(columns[_RECEIVED])
            sent += int(columns[_SENT])
    return received, sent

"""The balancer's thread that reads expert servers' token counts and passes them to the rebalancer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from balancer.live.hotness import Reading, Work
from balancer.live.rebalancer import Rebalancer
from balancer.server_rounds import ServerRounds
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import MemberState

__all__ = ["HotnessReader"]

_CALL_S = 2.0
# While servers are idle the pause grows to this many steps. No count is lost, because servers keep counting.
_LONGEST_PAUSE = 8
_READABLE = (MemberState.SERVING, MemberState.DRAINING, MemberState.SUSPECT)


class HotnessReader(ServerRounds):
    """Reads all servers each `step_s`, less often while they idle, until `close`.

    Args:
        rebalancer: Receives the readings.
        step_s: Seconds between two readings.
        on_read: Called after each reading.
        on_broken, tls: See `ServerRounds`.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        step_s: float,
        on_read: Callable[[], None],
        on_broken: Callable[[Exception], None],
        tls: Identity | None = None,
    ) -> None:
        self._rebalancer = rebalancer
        self._step_s = step_s
        self._on_read = on_read
        self._next_at, self._steps = time.monotonic(), 1
        super().__init__("hotness", on_broken, tls)
        self.begin()

    def _round(self) -> float:
        self._steps = 1 if self._read() else min(2 * self._steps, _LONGEST_PAUSE)
        # Missed steps are not repeated.
        now = time.monotonic()
        self._next_at = max(self._next_at + self._steps * self._step_s, now)
        return self._next_at - now

    def _read(self) -> bool:
        """Read all servers, and let the rebalancer observe; return whether a server's counts have changed."""
        try:
            now = self._rebalancer.snapshot()
        except TimeoutError:
            return False  # The planner is closing or busy: the next reading includes this step.
        servers = {s: m for s, m in now.servers.items() if m.state in _READABLE}
        load = self._rebalancer.load

        def send(stub: Any, server_id: str) -> Any:
            boot_id, sequence = load.position(server_id)
            request = pb.ReadHotnessRequest(boot_id=boot_id, sequence=sequence)
            return stub.ReadHotness.future(request, timeout=_CALL_S)

        answers, _ = self._call_all(servers, send)
        readings = {s: reading_of(answer) for s, answer in answers.items()}
        sizes = [answer.expert_bytes for answer in answers.values() if answer.expert_bytes]
        self._rebalancer.observe(readings, now, max(sizes, default=0))
        self._on_read()
        return any(answer.layers for answer in answers.values())


def reading_of(answer: pb.ReadHotnessResponse) -> Reading:
    """Convert an expert server's ReadHotness answer to a reading for the rebalancer."""
    tokens_LE = None
    if answer.layers:
        tokens_LE = np.array([layer.tokens for layer in answer.layers], np.int64)
    work = Work(answer.busy_s, answer.batches, answer.visits)
    carried = answer.received_bytes, answer.sent_bytes
    return Reading(answer.boot_id, answer.sequence, tokens_LE, work, carried)

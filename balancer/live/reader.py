"""The balancer's thread that reads expert servers' token counts and passes them to the rebalancer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import grpc
import numpy as np

from balancer.channel_pool import ServerChannels
from balancer.live.hotness import Reading, Work
from balancer.live.rebalancer import Rebalancer
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Member, MemberState

__all__ = ["HotnessReader"]

_log = get_logger(__name__)
_CALL_S = 2.0
_JOIN_S = 3.0
# While servers are idle the pause grows to this many steps. No count is lost, because servers keep counting.
_LONGEST_PAUSE = 8
_ASKED = (MemberState.SERVING, MemberState.DRAINING, MemberState.SUSPECT)


class HotnessReader:
    """Reads all servers each `step_s`, less often while they idle, from a daemon thread until `close`.

    Args:
        rebalancer: Receives the readings.
        step_s: Seconds between two readings.
        on_read: Called after each reading.
        on_broken: Called with an unexpected error; reading then stops.
        tls: This process's identity; None: plain text.
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
        self._on_broken = on_broken
        self._channels = ServerChannels(tls)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the reader's thread; the load is then not observed any more. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            next_at, steps = time.monotonic(), 1
            while not self._closed.is_set():
                steps = 1 if self._read() else min(2 * steps, _LONGEST_PAUSE)
                # Missed steps are not repeated.
                next_at = max(next_at + steps * self._step_s, time.monotonic())
                self._closed.wait(max(0.0, next_at - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            if not self._closed.is_set():
                _log.exception("the load is not read any more")
                self._on_broken(error)
        finally:
            self._channels.close()

    def _read(self) -> bool:
        """Read all servers, and let the rebalancer observe; return whether a server's counts have changed."""
        try:
            now = self._rebalancer.snapshot()
        except TimeoutError:
            return False  # The planner is closing or busy: the next reading includes this step.
        answers = self._ask({s: m for s, m in now.servers.items() if m.state in _ASKED})
        readings = {s: reading_of(answer) for s, answer in answers.items()}
        sizes = [answer.expert_bytes for answer in answers.values() if answer.expert_bytes]
        self._rebalancer.observe(readings, now, max(sizes, default=0))
        self._on_read()
        return any(answer.layers for answer in answers.values())

    def _ask(self, servers: Mapping[str, Member]) -> dict[str, pb.ReadHotnessResponse]:
        """Call ReadHotness on all servers in parallel; those that do not answer in time are left out."""
        self._channels.keep({m.address for m in servers.values()})
        load = self._rebalancer.load
        calls = {}
        for server_id, member in servers.items():
            pooled = self._channels.acquire(member.address)
            boot_id, sequence = load.position(server_id) if load else (0, 0)
            request = pb.ReadHotnessRequest(boot_id=boot_id, sequence=sequence)
            stub = expert_pb2_grpc.ExpertServiceStub(pooled.channel)
            calls[server_id] = pooled, stub.ReadHotness.future(request, timeout=_CALL_S)
        answers: dict[str, pb.ReadHotnessResponse] = {}
        for server_id, (pooled, call) in calls.items():
            try:
                answers[server_id] = call.result()
            except grpc.RpcError as error:
                _log.debug("%s does not report its load: %s", server_id, error)
            self._channels.release(pooled, works=server_id in answers)
        return answers


def reading_of(answer: pb.ReadHotnessResponse) -> Reading:
    """Convert an expert server's ReadHotness answer to a reading for the rebalancer."""
    tokens_LE = None
    if answer.layers:
        tokens_LE = np.array([layer.tokens for layer in answer.layers], np.int64)
    work = Work(answer.busy_s, answer.batches, answer.visits)
    carried = answer.received_bytes, answer.sent_bytes
    return Reading(answer.boot_id, answer.sequence, tokens_LE, work, carried)

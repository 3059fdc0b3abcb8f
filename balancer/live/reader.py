"""Asks servers what they computed, and has what follows from it done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import grpc
import numpy as np

from balancer.live.hotness import Reading, Work
from balancer.live.rebalancer import Rebalancer
from eaas.grpc_client import channel
from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, MemberState, Role

__all__ = ["HotnessReader"]

_log = get_logger(__name__)
_CALL_S = 2.0
_JOIN_S = 3.0
# Of servers that compute nothing the pause grows to so many steps: nothing is lost, since they count.
_LONGEST_PAUSE = 8
_ASKED = (MemberState.SERVING, MemberState.DRAINING, MemberState.SUSPECT)


class HotnessReader:
    """Looks at all servers each `step_s`, less often where they idle, from a daemon thread until `close`.

    Args:
        rebalancer: Told what they say.
        step_s: Seconds between two looks.
        on_look: Called after each.
        on_broken: Called with an error that nobody expected: no more looks are taken.
        tls: Who this process is to the servers; None: plain text.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        step_s: float,
        on_look: Callable[[], None],
        on_broken: Callable[[Exception], None],
        tls: Identity | None = None,
    ) -> None:
        self._tls = tls
        self._rebalancer = rebalancer
        self._step_s = step_s
        self._on_look = on_look
        self._on_broken = on_broken
        self._lines: dict[str, grpc.Channel] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            next_at, steps = time.monotonic(), 1
            while not self._closed.is_set():
                steps = 1 if self._look() else min(2 * steps, _LONGEST_PAUSE)
                # Steps that were missed are not made up for.
                next_at = max(next_at + steps * self._step_s, time.monotonic())
                self._closed.wait(max(0.0, next_at - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - whoever owns this ends the process with it
            if not self._closed.is_set():
                _log.exception("the load is not looked at any more")
                self._on_broken(error)
        finally:
            for line in self._lines.values():
                line.close()

    def _look(self) -> bool:
        """Says whether anything was computed since the last look."""
        try:
            now = self._rebalancer.glimpse()
        except TimeoutError:
            return False  # The planner is being closed, or busy: the next step has it all.
        answers = self._ask({s: m for s, m in now.servers.items() if m.state in _ASKED})
        readings = {s: reading_of(answer) for s, answer in answers.items()}
        sizes = [answer.expert_bytes for answer in answers.values() if answer.expert_bytes]
        self._rebalancer.look(readings, now, max(sizes, default=0))
        self._on_look()
        return any(answer.layers for answer in answers.values())

    def _ask(self, servers: Mapping[str, Member]) -> dict[str, pb.ReadHotnessResponse]:
        """All at once; those that do not answer in time are left out."""
        wanted = {m.address for m in servers.values()}
        for address in [a for a in self._lines if a not in wanted]:
            self._lines.pop(address).close()
        load = self._rebalancer.load
        calls = {}
        for server_id, member in servers.items():
            line = self._lines.get(member.address)
            if line is None:
                line = self._lines[member.address] = channel(
                    member.address, Role.EXPERT_SERVER.value, self._tls
                )
            boot_id, sequence = load.position(server_id) if load else (0, 0)
            request = pb.ReadHotnessRequest(boot_id=boot_id, sequence=sequence)
            stub = expert_pb2_grpc.ExpertServiceStub(line)
            calls[server_id] = stub.ReadHotness.future(request, timeout=_CALL_S)
        answers: dict[str, pb.ReadHotnessResponse] = {}
        silent: set[str] = set()
        for server_id, call in calls.items():
            try:
                answers[server_id] = call.result()
            except grpc.RpcError as error:
                _log.debug("%s does not tell its load: %s", server_id, error)
                silent.add(servers[server_id].address)
        # The next look connects anew, with the certificate of then.
        for address in silent:
            self._lines.pop(address).close()
        return answers


def reading_of(answer: pb.ReadHotnessResponse) -> Reading:
    """A server's word."""
    tokens_LE = None
    if answer.layers:
        tokens_LE = np.array([layer.tokens for layer in answer.layers], np.int64)
    work = Work(answer.busy_s, answer.batches, answer.visits)
    carried = answer.received_bytes, answer.sent_bytes
    return Reading(answer.boot_id, answer.sequence, tokens_LE, work, carried)

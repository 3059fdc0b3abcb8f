"""What a balancer leaves to whoever comes after it, kept in the monitor's store.

What is safe does not depend on it: epochs fence, and servers say what they hold (see `planner`). It keeps
what nobody else knows: what was wanted, what operators said, what was decided, what was answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from eaas.grpc_client import Backoff
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.session import MemberSession

__all__ = ["Journal", "fitted"]

_log = get_logger(__name__)
_CALL_S = 5.0
_JOIN_S = 3.0
# Below what the monitor takes, so that all that is wanted fits with some history.
_MOST_BYTES = 500 << 10


class Journal:
    """Writes the record from a thread of its own; what changes meanwhile goes into the next one.

    Args:
        session: Of the balancer.
        record: Gives the record of this moment; called on the journal's thread.
        on_broken: Called with an error that nobody expected: nothing is kept any more.
    """

    def __init__(
        self,
        session: MemberSession,
        record: Callable[[], pb.BalancerRecord],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._session = session
        self._record = record
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._wanted = self._kept = 0
        self._version = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """There is something to be kept. Does not block."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was told is kept. Says whether it is; else it will be once that works."""
        with self._changed:
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._kept >= wanted, timeout_s)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:  # noqa: BLE001 - whoever owns this ends the process with it
            _log.exception("the journal is broken")
            self._on_broken(error)

    def _keep(self) -> None:
        backoff = Backoff()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._wanted > self._kept)
                if self._closed.is_set():
                    return
                wanted = self._wanted
            self._version += 1
            data = fitted(self._record()).SerializeToString()
            try:
                self._session.keep_record(self._version, data, _CALL_S)
            except grpc.RpcError as error:
                # Also where the monitor takes this life for over: the session registers again.
                _log.debug("nothing is kept by the monitor for now: %s", error.details())
                self._closed.wait(backoff.next_s())
                continue
            backoff.reset()
            with self._changed:
                self._kept = wanted
                self._changed.notify_all()


def fitted(record: pb.BalancerRecord, most_bytes: int = _MOST_BYTES) -> pb.BalancerRecord:
    """The record without what is too much: answers first, then history, the oldest of them first."""
    for entries in (record.answered, record.history):
        while entries and record.ByteSize() > most_bytes:
            del entries[: max(1, len(entries) // 4)]
    return record

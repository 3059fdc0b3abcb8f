"""Write-ahead state: the balancer's record in the monitor's store, for its successor.

Safety does not depend on it: epochs fence stale balancers, and servers report what they hold (see `planner`).
The record keeps what no other process stores: wanted placement, operators' settings, decisions and answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from eaas.log import get_logger
from eaas.membership.session import MemberSession
from eaas.net.grpc_client import Backoff
from eaas.rpc.v1 import balancer_pb2 as pb

__all__ = ["WriteAheadState", "fitted"]

_log = get_logger(__name__)
_CALL_S = 5.0
_JOIN_S = 3.0
# Longest wait for the record to be stored before an operator is answered.
_STORE_S = 2.0
# Limit of the record: below the monitor's limit, enough for the wanted placement and some history.
_MOST_BYTES = 500 << 10


class WriteAheadState:
    """Writes the record to the monitor from its own thread; changes during a write go into the next one.

    Args:
        on_broken: Called with an unexpected error; writing then stops.
    """

    def __init__(self, on_broken: Callable[[Exception], None]) -> None:
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._wanted = self._stored = 0
        self._version = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, session: MemberSession, record: Callable[[], pb.BalancerRecord]) -> None:
        """Begin to write, once the previous balancer's state is restored.

        Args:
            session: The balancer's session with the monitor.
            record: Returns the current record; called on this object's thread.
        """
        self._thread = threading.Thread(
            target=self._run, args=(session, record), name="journal", daemon=True
        )
        self._thread.start()

    def changed(self) -> None:
        """Have the writing thread store the changed state at the monitor. Does not block."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all changes so far are stored; return False after the timeout (writing continues)."""
        with self._changed:
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._stored >= wanted, timeout_s)

    def store(self) -> None:
        """Store the record before an operator is answered, so that a successor has the change."""
        self.changed()
        if not self.flush(_STORE_S):
            _log.warning("an answer was given before the monitor had stored it")

    def close(self) -> None:
        """Stop the writing thread; what is not stored by then is lost (see `flush`). Idempotent."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self, session: MemberSession, record: Callable[[], pb.BalancerRecord]) -> None:
        try:
            self._write(session, record)
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            _log.exception("writing the balancer's record failed")
            self._on_broken(error)

    def _write(self, session: MemberSession, record: Callable[[], pb.BalancerRecord]) -> None:
        backoff = Backoff()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._wanted > self._stored)
                if self._closed.is_set():
                    return
                wanted = self._wanted
            self._version += 1
            data = fitted(record()).SerializeToString()
            try:
                session.keep_record(self._version, data, _CALL_S)
            except grpc.RpcError as error:
                # This includes a monitor that counts this process as dead, until the session registers again.
                _log.debug("the monitor does not store the record for now: %s", error.details())
                self._closed.wait(backoff.next_s())
                continue
            backoff.reset()
            with self._changed:
                self._stored = wanted
                self._changed.notify_all()


def fitted(record: pb.BalancerRecord, most_bytes: int = _MOST_BYTES) -> pb.BalancerRecord:
    """Drop answers, then history entries, the oldest first, until the monitor would store the record."""
    for entries in (record.answered, record.history):
        while entries and record.ByteSize() > most_bytes:
            del entries[: max(1, len(entries) // 4)]
    return record

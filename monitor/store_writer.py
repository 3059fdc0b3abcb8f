"""Writes the registry's changes to the store, on a background thread of the leading monitor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from eaas.log import get_logger
from monitor.incarnation import MemberEvent
from monitor.records import Records
from monitor.registry import Registry
from monitor.store import Change, Store, StoreLostError

__all__ = ["Collector", "StoreWriter"]

_log = get_logger(__name__)
# Timeout of closing, longer than any write takes on a healthy disk.
_CLOSE_S = 5.0


class Collector:
    """Collects a registry's changes since the last write to the store. Pure.

    Args:
        registry: Just restored, so that its whole content is stored.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.revision = registry.revision
        members, _ = registry.capture()
        self._stored = {m.id for m in members}
        # Ids of the tombstones among these members.
        self._gone = {m.id for m in members if m.state.is_gone}

    def collect(self) -> Change:
        """Return the store's next write: all changes since the last call, with each member's last event."""
        registry = self._registry
        events = registry.since(self.revision)
        candidates = self._gone
        if events is None:
            # The registry no longer keeps all events.
            events = [
                MemberEvent(registry.revision, member, "as it was found")
                for member in registry.changed_since(self.revision)
            ]
            candidates = self._stored
        removed = {member_id for member_id in candidates if not registry.knows(member_id)}
        last = {event.member.id: event for event in events}
        for event in tuple(last.values()):
            if not registry.knows(event.member.id):
                # The registry has forgotten the member since that event.
                removed.add(event.member.id)
                del last[event.member.id]
        gone = {e.member.id for e in last.values() if e.member.state.is_gone}
        self._gone = (self._gone - removed - last.keys()) | gone
        # In place, because the set has all members.
        self._stored -= removed
        self._stored |= last.keys()
        self.revision = registry.revision
        return Change(
            revision=registry.revision,
            forgotten_incarnation=registry.forgotten_incarnation,
            events=tuple(sorted(last.values(), key=lambda event: event.revision)),
            removed=tuple(sorted(removed)),
        )


class StoreWriter:
    """Writes the registry's changes to the store from a background thread, several in one write.

    Args:
        registry: Guarded by `lock`.
        store: No other writer uses it.
        lock: Held while the registry is used.
        on_stored: Called with the lock held when `stored` has risen.
        on_lost: Called once, without the lock, when the store fails.
        records: Members' records, also guarded by `lock`.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        lock: threading.RLock,
        on_stored: Callable[[], None],
        on_lost: Callable[[str], None],
        records: Records,
    ) -> None:
        self._records = records
        self.stored_records = 0
        """Number of records (`Records.kept`) in the store, which survive this process."""
        self._registry = registry
        self._store = store
        self._collector = Collector(registry)
        self._due = threading.Condition(lock)
        self._on_stored = on_stored
        self._on_lost = on_lost
        self._over = False
        self.stored = registry.revision
        """Last revision in the store, which survives this process."""
        self._thread = threading.Thread(target=self._run, name="monitor-store", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread to write new changes to the store. The lock is held."""
        self._due.notify()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write the pending changes, then end the thread; blocks some seconds. The lock is not held."""
        with self._due:
            self._over = True
            self._due.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the store is still busy: the last changes may be lost")

    def _run(self) -> None:
        try:
            self._write_changes()
        except StoreLostError as error:
            self._on_lost(str(error))
        except Exception as error:  # noqa: BLE001 (logged and reported: nothing is stored from now on)
            _log.exception("the store writer ends")
            self._on_lost(f"the monitor's store writer failed: {error!r}")

    def _write_changes(self) -> None:
        while True:
            with self._due:
                self._due.wait_for(lambda: self._over or self._is_due())
                if not self._is_due():
                    return
                kept = self._records.kept
                change = replace(self._collector.collect(), records=self._records.take())
            self._store.write(change)
            with self._due:
                self.stored, self.stored_records = change.revision, kept
                self._on_stored()

    def _is_due(self) -> bool:
        return self._registry.revision != self.stored or self._records.pending

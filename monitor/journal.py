"""Bringing what a registry learns into a store, behind the backs of those who tell it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from eaas.log import get_logger
from monitor.life import MemberEvent
from monitor.records import Records
from monitor.registry import Registry
from monitor.store import Change, Store, StoreLostError

__all__ = ["Collector", "Journal"]

_log = get_logger(__name__)
# More than any write takes on a disk that is well; whoever ends does not wait for one that is not.
_CLOSE_S = 5.0


class Collector:
    """What of a registry is not stored yet. Pure.

    Args:
        registry: As it was restored: what it holds is stored.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.revision = registry.revision
        members = registry.members(0.0)
        self._stored = {m.id for m in members}
        # Those of them that are forgotten one day.
        self._gone = {m.id for m in members if m.state.is_gone}

    def collect(self) -> Change:
        """Everything since the last time: of each member the last event."""
        registry = self._registry
        events = registry.since(self.revision)
        suspects = self._gone
        if events is None:
            # More has happened than is remembered.
            events = [
                MemberEvent(registry.revision, member, "as it was found")
                for member in registry.members(0.0)
            ]
            suspects = self._stored
        removed = {member_id for member_id in suspects if not registry.knows(member_id)}
        last = {event.member.id: event for event in events}
        for event in tuple(last.values()):
            if not registry.knows(event.member.id):
                # It came, or was here, went and was forgotten since.
                removed.add(event.member.id)
                del last[event.member.id]
        gone = {e.member.id for e in last.values() if e.member.state.is_gone}
        self._gone = (self._gone - removed - last.keys()) | gone
        self._stored = (self._stored - removed) | last.keys()
        self.revision = registry.revision
        return Change(
            revision=registry.revision,
            forgotten_incarnation=registry.forgotten_incarnation,
            events=tuple(sorted(last.values(), key=lambda event: event.revision)),
            removed=tuple(sorted(removed)),
        )


class Journal:
    """Writes from a thread of its own. What happens during a write goes into the next one, together.

    Args:
        registry: Guarded by `lock`.
        store: Nobody else writes to it.
        lock: Held while the registry is touched.
        on_stored: Called with the lock held when `stored` rose.
        on_lost: Called once, without the lock, when the store takes nothing any more.
        records: What members leave, guarded by `lock`, too.
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
        """Of `Records.kept`, how many survive this process."""
        self._registry = registry
        self._store = store
        self._collector = Collector(registry)
        self._due = threading.Condition(lock)
        self._on_stored = on_stored
        self._on_lost = on_lost
        self._over = False
        self.stored = registry.revision
        """Revision up to which everything survives this process."""
        self._thread = threading.Thread(target=self._run, name="monitor-journal", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something happened (the lock is held)."""
        self._due.notify()

    def close(self) -> None:
        """Writes what there is, then ends. The lock is not held. Blocks for a few seconds at most."""
        with self._due:
            self._over = True
            self._due.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the store is still busy: what happened last may not be kept")

    def _run(self) -> None:
        try:
            self._keep()
        except StoreLostError as error:
            self._on_lost(str(error))
        except Exception as error:  # noqa: BLE001 (logged, and told: from now on nothing is kept)
            _log.exception("the journal ends")
            self._on_lost(f"the monitor's journal failed: {error!r}")

    def _keep(self) -> None:
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

"""Who has which slots of the arena.

A client gets a contiguous run of slots and a generation; every header it writes bears the generation, so what
a former owner wrote is never taken for the new owner's. The table is used by the service's threads and by the
loop; a slot that the loop is computing is not handed out again before the loop is done with it.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from dataclasses import dataclass

from eaas.wire import Arena, SlotState
from eaas.wire.slot import reply_bell

__all__ = ["Grant", "SlotTable"]


@dataclass(frozen=True)
class Grant:
    """A client's slots."""

    connection_id: str
    client_id: str
    client_incarnation: int
    generation: int
    first_slot: int
    slots: int

    @property
    def reply_bell(self) -> int:
        """Bell to ring when one of these slots is done."""
        return reply_bell(self.first_slot)


class SlotTable:
    """Grants over one arena.

    Args:
        arena: The server's arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._owner: list[Grant | None] = [None] * arena.slots
        self._busy: frozenset[int] = frozenset()
        self._generations = itertools.count(1)

    def grant(self, client_id: str, client_incarnation: int, slots: int) -> Grant | None:
        """Give a client a run of free slots; None where there is no such run.

        What another life of the same client held is taken back first.
        """
        with self._lock:
            for old in tuple(self._grants.values()):
                if old.client_id == client_id and old.client_incarnation != client_incarnation:
                    self._revoke(old)
            first = self._free_run(slots)
            if first is None:
                return None
            grant = Grant(
                uuid.uuid4().hex,
                client_id,
                client_incarnation,
                next(self._generations),
                first,
                slots,
            )
            for slot in range(first, first + slots):
                self._arena.server_offline(slot)
                self._arena.set_generation(slot, grant.generation)
                self._arena.server_reclaim(slot)
                self._owner[slot] = grant
            self._grants[grant.connection_id] = grant
            return grant

    def revoke(self, connection_id: str) -> None:
        """Take a connection's slots back. Idempotent."""
        with self._lock:
            grant = self._grants.get(connection_id)
            if grant is not None:
                self._revoke(grant)

    def revoke_lives(self, client_id: str, up_to_incarnation: int) -> int:
        """Take back what a client holds from these lives of it. Returns how many connections."""
        with self._lock:
            gone = [
                grant
                for grant in self._grants.values()
                if grant.client_id == client_id and grant.client_incarnation <= up_to_incarnation
            ]
            for grant in gone:
                self._revoke(grant)
            return len(gone)

    def revoke_all(self) -> None:
        """Take every slot back (the server's lease lapsed: it fences itself)."""
        with self._lock:
            for grant in tuple(self._grants.values()):
                self._revoke(grant)

    def get(self, connection_id: str) -> Grant | None:
        """A living grant."""
        with self._lock:
            return self._grants.get(connection_id)

    def clients(self) -> set[str]:
        """Everybody who holds slots."""
        with self._lock:
            return {grant.client_id for grant in self._grants.values()}

    def owner(self, slot: int) -> Grant | None:
        """Whose slot it is now. For the loop; a slot's owner may change right afterwards."""
        return self._owner[slot]

    def set_busy(self, slots: frozenset[int]) -> None:
        """The loop's word: these are being computed, do not hand them out."""
        with self._lock:
            self._busy = slots

    def _free_run(self, slots: int) -> int | None:
        run = 0
        for slot, owner in enumerate(self._owner):
            run = run + 1 if owner is None and slot not in self._busy else 0
            if run == slots:
                return slot - slots + 1
        return None

    def _revoke(self, grant: Grant) -> None:
        for slot in range(grant.first_slot, grant.first_slot + grant.slots):
            self._owner[slot] = None
            if self._arena.flags.load(slot) != SlotState.OFFLINE:
                self._arena.server_offline(slot)
        del self._grants[grant.connection_id]
        self._arena.flags.interrupt(grant.reply_bell)

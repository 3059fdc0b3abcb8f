"""Who has which slots of the arena.

A client gets a contiguous run of slots and a generation; every header it writes bears the generation, so what
a former owner wrote is never taken for the new owner's. The table is used by the service's threads and by the
loop; a slot that the loop is computing, or that a stream is copying, is not handed out again before they are
done with it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from eaas.wire import Arena
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
        self._copying: Counter[int] = Counter()
        self._generations = itertools.count(1)

    def grant(self, client_id: str, client_incarnation: int, slots: int) -> Grant | None:
        """Give a client a run of free slots; None where there is no such run.

        A client has one connection: what it held before, in this life or an earlier one, is taken back first
        (it comes again because it lost that connection, and its goodbye may have been lost, too).
        """
        with self._lock:
            for old in tuple(self._grants.values()):
                if old.client_id == client_id and old.client_incarnation <= client_incarnation:
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
                # In this order: whoever sees the slot FREE sees the new generation, and the loop knows
                # the owner before it can have written.
                self._arena.server_offline(slot)
                self._arena.set_generation(slot, grant.generation)
                self._owner[slot] = grant
                self._arena.server_reclaim(slot)
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
        """Whose slot it is now. For the loop: a busy slot's owner may vanish, but not become another."""
        return self._owner[slot]

    def set_busy(self, slots: frozenset[int]) -> None:
        """The loop's word: these are being computed, do not hand them out.

        One of them may have been handed out between the loop's look at its flag and this call: the loop
        looks again afterwards.
        """
        with self._lock:
            self._busy = slots

    @contextlib.contextmanager
    def copying(self, grant: Grant) -> Iterator[bool]:
        """Keep a connection's slots from being handed out while a stream copies into or out of them.

        Yields whether the grant lives. It may be revoked meanwhile: then its flags do not move any more.
        """
        slots = range(grant.first_slot, grant.first_slot + grant.slots)
        with self._lock:
            lives = grant.connection_id in self._grants
            if lives:
                self._copying.update(slots)
        try:
            yield lives
        finally:
            if lives:
                with self._lock:
                    self._copying.subtract(slots)

    def _free_run(self, slots: int) -> int | None:
        run = 0
        for slot, owner in enumerate(self._owner):
            taken = owner is not None or slot in self._busy or self._copying[slot] > 0
            run = 0 if taken else run + 1
            if run == slots:
                return slot - slots + 1
        return None

    def _revoke(self, grant: Grant) -> None:
        for slot in range(grant.first_slot, grant.first_slot + grant.slots):
            self._owner[slot] = None
            self._arena.server_offline(slot)
        del self._grants[grant.connection_id]
        self._arena.flags.interrupt(grant.reply_bell)

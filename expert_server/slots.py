"""Who has which slots of the arena.

A client gets a contiguous run of slots and a generation; every header it writes bears the generation, so what
a former owner wrote is never taken for the new owner's. The table is used by the service's threads and by the
loop. A slot may be revoked at any moment; one that the loop has claimed, or that a stream is copying, is not
handed out again before they are done with it.

Why the loop needs no lock while it works on a slot:

    loop                                        service's thread
    L1  sees WRITTEN                            S1  revoke: owner = none, flag = OFFLINE
    L2  claim: busy, reads the owner            S2  grant, where not busy: flag = OFFLINE, generation,
    L3  looks at the flag once more                 owner, flag = FREE
    L4  reads the request, computes,            (L2 and L5, S1 and S2 are each one step: under the lock)
        writes the result, WRITTEN to DONE
    L5  release: not busy

Between L2 and L5 nobody is granted the slot (S2), so its owner at L2 is the only one it can have until L5,
and its bytes are that one's or the loop's. If S1 and S2 came between L1 and L2, the owner is the new one: L3
finds FREE, and there is nothing to do; or WRITTEN, and then it is the new owner's request. If S1 comes after
L2, the flag is OFFLINE, L4's last step does not move it, and the answer goes nowhere.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from eaas.types import Member
from eaas.wire import Arena
from eaas.wire.slot import reply_bell

__all__ = ["Grant", "SlotTable", "last_gone"]


def last_gone(former: Member | None, now: Member) -> int:
    """Up to which incarnation the lives of a client are over.

    Args:
        former: As it was in the view before this one; None where it was not there.
        now: As it is.
    """
    gone = now.incarnation if now.state.is_gone else now.incarnation - 1
    if former is not None and (former.host, former.pid) != (now.host, now.pid):
        # A monitor that forgot everything may have given the next process a lower incarnation.
        gone = max(gone, former.incarnation)
    return gone


@dataclass(frozen=True, eq=False)
class Grant:
    """A client's slots. One is equal to itself alone (and cheap to hash: the loop does so in every call)."""

    connection_id: str
    client_id: str
    client_incarnation: int
    generation: int
    first_slot: int
    slots: int
    granted_at: float

    @property
    def reply_bell(self) -> int:
        """Bell to ring when one of these slots is done."""
        return reply_bell(self.first_slot)


class SlotTable:
    """Grants over one arena.

    Args:
        arena: The server's arena.

    Attributes:
        changes: Moves with every grant and every revocation.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._owner: list[Grant | None] = [None] * arena.slots
        self._busy = [False] * arena.slots
        self._copying: Counter[int] = Counter()
        self._generations = itertools.count(1)
        self.changes = 0

    def grant(self, client_id: str, client_incarnation: int, slots: int) -> Grant | None:
        """Give a client a run of free slots; None where there is no such run.

        A client has one connection: what it held before, in this life or an earlier one, is taken back first
        (it comes again because it lost that connection, and its goodbye may have been lost, too). A request
        of an earlier life leaves the latest one its slots; no client has more than these two.
        """
        with self._lock:
            former = [old for old in self._grants.values() if old.client_id == client_id]
            latest = max((old.client_incarnation for old in former), default=0)
            for old in former:
                if old.client_incarnation <= client_incarnation or old.client_incarnation < latest:
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
                time.monotonic(),
            )
            for slot in range(first, first + slots):
                # In this order: whoever sees the slot FREE sees the new generation, and the loop knows
                # the owner before it can have written.
                self._arena.server_offline(slot)
                self._arena.set_generation(slot, grant.generation)
                self._owner[slot] = grant
                self._arena.server_reclaim(slot)
            self._grants[grant.connection_id] = grant
            self.changes += 1
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

    def revoke_unknown(self, incarnations: Mapping[str, int], older_than_s: float) -> int:
        """Take back what no living client holds. Returns how many connections.

        Args:
            incarnations: Of the living clients, by id.
            older_than_s: A client may connect before this server hears of it: younger connections stay.
        """
        before = time.monotonic() - older_than_s
        with self._lock:
            gone = [
                grant
                for grant in self._grants.values()
                if incarnations.get(grant.client_id) != grant.client_incarnation
                and grant.granted_at < before
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

    def grants(self) -> list[Grant]:
        """The living grants."""
        with self._lock:
            return list(self._grants.values())

    def claim(self, slots: Collection[int]) -> list[Grant | None]:
        """The loop's word: it works on these slots now, do not hand them out.

        Returns:
            Whose they are. Until `release` an owner may vanish, but not become another.
        """
        with self._lock:
            for slot in slots:
                self._busy[slot] = True
            return [self._owner[slot] for slot in slots]

    def release(self, slots: Collection[int]) -> None:
        """The loop is done with these slots."""
        with self._lock:
            for slot in slots:
                self._busy[slot] = False

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
            taken = owner is not None or self._busy[slot] or self._copying[slot] > 0
            run = 0 if taken else run + 1
            if run == slots:
                return slot - slots + 1
        return None

    def _revoke(self, grant: Grant) -> None:
        for slot in range(grant.first_slot, grant.first_slot + grant.slots):
            self._owner[slot] = None
            self._arena.server_offline(slot)
        del self._grants[grant.connection_id]
        self.changes += 1
        self._arena.flags.interrupt(grant.reply_bell)

"""Slot ownership: which client may write into which slots of the expert server's arena.

A client gets a contiguous run of slots and a generation. Every header it writes carries the generation, so
bytes of a former owner never count as the new owner's. The service's threads and the loop share the table.
A slot may be revoked at any moment, but a slot that the loop has claimed or a stream is copying is granted
again only after they are done with it.

Why the loop needs no lock (its verbs: `expert_server/loop/slots.h`):

    loop                                        service's thread
    L1  sees WRITTEN                            S1  revoke: owner = none, flag = OFFLINE
    L2  accept: busy; reads the owner, and      S2  grant, if not busy: flag = OFFLINE, generation,
        the flag again; reads the header            owner, flag = FREE
    L3  computes, writes the answer,
        WRITTEN to DONE
    L4  release: not busy

L2 and L4 are one step each, under the interpreter's lock. S1 and S2 are several, and the table's lock keeps
them apart. L2 sets busy and reads the owner; S1 clears the owner before S2 reads busy. So either L2 finds no
owner, or S2 finds the slot busy. An L2 in the middle of S2 finds no owner or OFFLINE, and claims nothing.

Between L2 and L4 the slot cannot be granted (S2), so it has no other owner than at L2, and only that owner or
the loop writes its bytes. If S1 and S2 came between L1 and L2, the owner is the new one: L2 finds FREE, and
there is nothing to do, or WRITTEN, and the request is the new owner's. If S1 comes after L2, the flag is
OFFLINE: L3's last step does not change it, and the answer is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eaas.errors import SharedMemoryError
from eaas.types import Member
from eaas.wire import Arena
from eaas.wire.slot import reply_doorbell

__all__ = ["Grant", "SlotTable", "last_gone"]


def last_gone(former: Member | None, now: Member) -> int:
    """Return a client's last incarnation that is dead, has left or was replaced, so that its slots are freed.

    Args:
        former: The client in the previous view; None if it was not there.
        now: The client in the current view.
    """
    gone = now.incarnation if now.state.is_gone else now.incarnation - 1
    if former is not None and (former.host, former.pid) != (now.host, now.pid):
        # A monitor that lost its records may have given the next process a lower incarnation.
        gone = max(gone, former.incarnation)
    return gone


@dataclass(frozen=True, eq=False)
class Grant:
    """A client's slots, with memory for so many bytes of a payload and of a result in each.

    Compared and hashed by identity: the loop hashes grants on every call.
    """

    connection_id: str
    client_id: str
    client_incarnation: int
    generation: int
    first_slot: int
    slots: int
    payload_capacity: int
    result_capacity: int
    granted_at: float

    @property
    def reply_doorbell(self) -> int:
        """Doorbell that the loop rings for an answer in these slots, to wake the client or its stream."""
        return reply_doorbell(self.first_slot)


class SlotTable:
    """The grants of a server's arena: which client owns which slots. Thread-safe.

    Args:
        arena: The server's arena.

    Attributes:
        changes: Counts grants and revocations.
        busy: Whether the loop works on a slot, for each: 1 from the claim to the release, then 0. A busy slot
            is not granted.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._owner: list[Grant | None] = [None] * arena.slots
        # Of each slot's owner, for compiled code; generation 0: no owner.
        self._generations_of = array("Q", bytes(8 * arena.slots))
        self._doorbells_of = array("i", bytes(4 * arena.slots))
        self._capacities_of = array("Q", bytes(2 * 8 * arena.slots))
        # Slots that no grant gets: how many streams copy, and calls take memory.
        self._reserved: Counter[int] = Counter()
        self._generations = itertools.count(1)
        self.changes = 0
        self.busy = bytearray(arena.slots)

    def grant(
        self,
        client_id: str,
        client_incarnation: int,
        slots: int,
        sizes: Sequence[tuple[int, int]] = (),
    ) -> Grant | None:
        """Give a client that connects a run of free slots; None if there is no such run.

        A client has one connection. A client that connects again has lost the former one, and its
        Disconnect may be lost as well. So the slots of this incarnation and earlier ones are freed first.
        A late request of an older incarnation keeps the newest incarnation's slots.

        Args:
            client_id: The client.
            client_incarnation: Its incarnation.
            slots: Number of slots.
            sizes: Bytes of a payload and of a result, ascending: the slots get the largest ones for which
                there is memory. Empty: the arena's.

        Raises:
            SharedMemoryError: There is no memory even for the smallest.
        """
        with self._lock:
            self._revoke_former(client_id, client_incarnation)
            first = self._free_run(slots)
            if first is None:
                return None
            run = range(first, first + slots)
            self._reserved.update(run)
        try:
            # Without the lock, which the loop needs for each answer: the kernel clears the memory.
            capacities = self._allocate(run, sizes)
        except SharedMemoryError:
            with self._lock:
                self._reserved.subtract(run)
            raise
        with self._lock:
            self._reserved.subtract(run)
            if any(self.busy[slot] for slot in run):
                # The loop found a request in a slot without an owner, and has not dropped it yet.
                return None
            # Another call of this client may have got slots meanwhile.
            self._revoke_former(client_id, client_incarnation)
            grant = Grant(
                uuid.uuid4().hex,
                client_id,
                client_incarnation,
                next(self._generations),
                first,
                slots,
                *capacities,
                time.monotonic(),
            )
            for slot in run:
                # In this order, so that a client that sees FREE also sees the new generation, and the loop
                # sees the owner before the owner can write.
                self._arena.server_offline(slot)
                self._arena.set_generation(slot, grant.generation)
                self._owner[slot] = grant
                self._doorbells_of[slot] = grant.reply_doorbell
                self._capacities_of[2 * slot], self._capacities_of[2 * slot + 1] = capacities
                self._generations_of[slot] = grant.generation
                self._arena.server_reclaim(slot)
            self._grants[grant.connection_id] = grant
            self.changes += 1
            return grant

    def revoke(self, connection_id: str) -> None:
        """Take a connection's slots back at its end: requests in them are dropped. Idempotent."""
        with self._lock:
            grant = self._grants.get(connection_id)
            if grant is not None:
                self._revoke(grant)

    def revoke_incarnations(self, client_id: str, up_to_incarnation: int) -> int:
        """Free the slots of a client's incarnations up to this one, which the monitor says are gone.

        Returns the number of connections.
        """
        return self._revoke_if(
            lambda grant: (
                grant.client_id == client_id and grant.client_incarnation <= up_to_incarnation
            )
        )

    def revoke_unknown(self, incarnations: Mapping[str, int], older_than_s: float) -> int:
        """Free the slots of clients that are not live members, when Connect finds none free.

        Returns the number of connections.

        Args:
            incarnations: Incarnations of the live clients, by id.
            older_than_s: Keep younger connections, as a client may connect before this server learns of it.
        """
        before = time.monotonic() - older_than_s
        return self._revoke_if(
            lambda grant: (
                incarnations.get(grant.client_id) != grant.client_incarnation
                and grant.granted_at < before
            )
        )

    def revoke_all(self) -> None:
        """Take the slots of all clients back, when this server ends, lost its lease or was replaced."""
        self._revoke_if(lambda _grant: True)

    def get(self, connection_id: str) -> Grant | None:
        """The grant of a client connection; None if it is unknown or revoked, so that its stream must end."""
        with self._lock:
            return self._grants.get(connection_id)

    def clients(self) -> set[str]:
        """Ids of the clients that hold slots, to compare with the cluster's members."""
        with self._lock:
            return {grant.client_id for grant in self._grants.values()}

    def grants(self) -> list[Grant]:
        """The current grants of all clients; the loop's batcher forgets all others."""
        with self._lock:
            return list(self._grants.values())

    @property
    def owners(self) -> tuple[bytearray, array[int], array[int], array[int]]:
        """For compiled code: `busy`; generation, doorbell and capacities of each slot's owner."""
        return self.busy, self._generations_of, self._doorbells_of, self._capacities_of

    def owner(self, slot: int) -> Grant | None:
        """The grant that a slot belongs to; None: it is free."""
        return self._owner[slot]

    def close_unowned(self, slot: int) -> None:
        """Take a slot offline if it has no owner: the loop found a request there, or what looks like one."""
        with self._lock:
            if self._owner[slot] is None:
                self._arena.server_offline(slot)

    @contextlib.contextmanager
    def copying(self, grant: Grant) -> Iterator[bool]:
        """Keep a connection's slots from being granted while a stream copies into or out of them.

        Yields whether the grant is valid. It may be revoked during the copy; its flags then no longer change.
        """
        slots = range(grant.first_slot, grant.first_slot + grant.slots)
        with self._lock:
            valid = grant.connection_id in self._grants
            if valid:
                self._reserved.update(slots)
        try:
            yield valid
        finally:
            if valid:
                with self._lock:
                    self._reserved.subtract(slots)

    def _allocate(self, run: range, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Take memory for slots, size after size, so that a size without memory wastes little."""
        taken: tuple[int, int] | None = None
        for size in sizes or [(self._arena.payload_capacity, self._arena.result_capacity)]:
            try:
                self._arena.allocate(run.start, len(run), *size)
            except SharedMemoryError:
                if taken is None:
                    raise
                break
            taken = size
        assert taken is not None
        return taken

    def _free_run(self, slots: int) -> int | None:
        run = 0
        for slot, owner in enumerate(self._owner):
            taken = owner is not None or self.busy[slot] or self._reserved[slot] > 0
            run = 0 if taken else run + 1
            if run == slots:
                return slot - slots + 1
        return None

    def _revoke_former(self, client_id: str, client_incarnation: int) -> None:
        former = [old for old in self._grants.values() if old.client_id == client_id]
        latest = max((old.client_incarnation for old in former), default=0)
        for old in former:
            if old.client_incarnation <= client_incarnation or old.client_incarnation < latest:
                self._revoke(old)

    def _revoke_if(self, is_gone: Callable[[Grant], bool]) -> int:
        with self._lock:
            gone = [grant for grant in self._grants.values() if is_gone(grant)]
            for grant in gone:
                self._revoke(grant)
            return len(gone)

    def _revoke(self, grant: Grant) -> None:
        for slot in range(grant.first_slot, grant.first_slot + grant.slots):
            self._owner[slot] = None
            self._generations_of[slot] = 0
            self._arena.server_offline(slot)
        del self._grants[grant.connection_id]
        self.changes += 1
        self._arena.flags.interrupt(grant.reply_doorbell)

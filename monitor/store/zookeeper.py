"""The monitor's store in ZooKeeper: its layout, and how the writes of a former leader are fenced.

    ROOT/monitor/state            {"schema", "epoch", "life", "revision", "forgotten_incarnation"}
    ROOT/monitor/members/m-ID     the member's last event (eaas.rpc.v1.MemberEvent)
    ROOT/monitor/records/m-ID     the member's record for its successor (eaas.rpc.v1.KeepRecordRequest)
    ROOT/monitor/election/c-N     one ephemeral node for each monitor (`monitor.store.candidate`)

Each write is a transaction that sets `state` at the version that its writer has read. A new leader first sets
it, with the next epoch, and then reads the members. From then on its predecessor has an outdated version, and
all of its writes fail.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError
from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, RolledBackError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import ZnodeStat

from eaas.errors import StoreError
from monitor.incarnation import MemberEvent
from monitor.store.kept import (
    Change,
    Kept,
    StoreLostError,
    event_from_bytes,
    event_to_bytes,
    new_life,
)

__all__ = ["TROUBLE", "ZooKeeperStore", "parts"]

TROUBLE = (KazooException, KazooTimeoutError)
"""Exceptions of kazoo when ZooKeeper refuses or does not answer."""

_SCHEMA = 1
# Share of the session timeout for which the lead lasts after sending a request that was answered. ZooKeeper
# counts from when it received that request, which is later.
_LEAD_SHARE = 2 / 3
# Limit of one transaction, because ZooKeeper takes messages below 1 MiB.
_PART_BYTES = 512 << 10
_READS_AT_ONCE = 256


class ZooKeeperStore:
    """The monitor's store in ZooKeeper. Creating it takes the lead: predecessors can no longer write.

    Create it in the session that won the election.

    Args:
        client: Connected client of ZooKeeper.
        root: Path of the cluster in ZooKeeper.
        session_s: The client's session timeout.

    Raises:
        StoreError: The stored state is damaged or of a newer version.
        StoreLostError: Another monitor has taken the lead, or ZooKeeper does not answer.

    Attributes:
        kept: See `Store`.
        leads_until: See `Store`.
        epoch: Number of times a monitor has taken the lead.
    """

    def __init__(self, client: KazooClient, root: str, session_s: float) -> None:
        self._client = client
        # Serialises requests with the version, because another thread confirms the lead.
        self._version_lock = threading.Lock()
        self._state = f"{root}/monitor/state"
        self._members = f"{root}/monitor/members"
        self._records = f"{root}/monitor/records"
        self._session_s = session_s
        # The first request may take a whole session.
        self.leads_until = time.monotonic() + session_s
        try:
            self._wait(client.ensure_path_async(self._members))
            self._wait(client.ensure_path_async(self._records))
            self._take_the_lead()
            self.kept = self._read()
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"ZooKeeper's {root}/monitor is damaged ({error}): delete that path, or give another "
                "monitor.zookeeper_root; live members register again and keep their incarnations"
            ) from error

    def _take_the_lead(self) -> None:
        if self._wait(self._client.exists_async(self._state)) is None:
            first = self._state_bytes(Kept(life=new_life()), 0)
            self._wait(self._client.create_async(self._state, first))
        data, stat = self._wait(self._client.get_async(self._state))
        state = json.loads(data)
        if state["schema"] > _SCHEMA:
            raise StoreError(
                f"ZooKeeper's {self._state} was written by a newer version (schema {state['schema']}, "
                f"this one knows {_SCHEMA}): start that version, or give another monitor.zookeeper_root"
            )
        self.epoch: int = state["epoch"] + 1
        self._history = Kept(state["life"], state["revision"], state["forgotten_incarnation"])
        self._version = stat.version
        self._commit(self._history, [])

    def _read(self) -> Kept:
        names = self._wait(self._client.get_children_async(self._members))
        events: list[MemberEvent] = []
        for start in range(0, len(names), _READS_AT_ONCE):
            asked = [
                self._client.get_async(f"{self._members}/{name}")
                for name in names[start : start + _READS_AT_ONCE]
            ]
            found = (event_from_bytes(self._wait(answer)[0]) for answer in asked)
            events += (event for event in found if event)
            self.confirm()
        events.sort(key=lambda event: event.revision)
        self._known = {unquote(name.removeprefix("m-")) for name in names}
        history = self._history
        records = []
        for name in self._wait(self._client.get_children_async(self._records)):
            data, _ = self._wait(self._client.get_async(f"{self._records}/{name}"))
            records.append((unquote(name.removeprefix("m-")), data))
        self._recorded = {member_id for member_id, _ in records}
        return Kept(
            history.life,
            history.revision,
            history.forgotten_incarnation,
            tuple(events),
            tuple(records),
        )

    def confirm(self) -> None:
        """Check that this monitor still leads, and extend `leads_until`. Raises StoreLostError otherwise.

        The candidate's thread calls it several times per session timeout.
        """
        with self._version_lock:
            began = time.monotonic()
            _, stat = self._wait(self._client.get_async(self._state))
            if stat.version != self._version:
                raise StoreLostError("another monitor has taken the lead")
            self._heard(began)

    def write(self, change: Change) -> None:
        """Write a change of the membership; returns when ZooKeeper has it. Raises StoreLostError."""
        for part in parts(change):
            history = Kept(self._history.life, part.revision, part.forgotten_incarnation)
            operations: list[tuple[str, str, bytes]] = []
            for event in part.events:
                verb = "set" if event.member.id in self._known else "create"
                operations.append((verb, self._path(event.member.id), event_to_bytes(event)))
            gone = [member_id for member_id in part.removed if member_id in self._known]
            operations += (("delete", self._path(member_id), b"") for member_id in gone)
            for member_id, record in part.records:
                verb = "set" if member_id in self._recorded else "create"
                operations.append((verb, self._path(member_id, self._records), record))
            self._commit(history, operations)
            self._recorded.update(member_id for member_id, _ in part.records)
            self._history = history
            self._known.update(event.member.id for event in part.events)
            self._known.difference_update(gone)

    def close(self) -> None:
        """Do nothing; the candidate ends the ZooKeeper session."""

    def _commit(self, history: Kept, operations: list[tuple[str, str, bytes]]) -> None:
        with self._version_lock:
            began = time.monotonic()
            transaction = self._client.transaction()
            transaction.set_data(
                self._state, self._state_bytes(history, self.epoch), version=self._version
            )
            for verb, path, data in operations:
                if verb == "set":
                    transaction.set_data(path, data)
                elif verb == "create":
                    transaction.create(path, data)
                else:
                    transaction.delete(path)
            results = self._wait(transaction.commit_async())
            errors = [r for r in results if isinstance(r, Exception)]
            if errors:
                if any(isinstance(error, BadVersionError) for error in errors):
                    raise StoreLostError("another monitor has taken the lead")
                cause = next((e for e in errors if not isinstance(e, RolledBackError)), errors[0])
                raise StoreLostError(f"ZooKeeper refuses a write: {cause!r}")
            stat: ZnodeStat = results[0]
            self._version = stat.version
            self._heard(began)

    def _heard(self, asked_at: float) -> None:
        self.leads_until = asked_at + _LEAD_SHARE * self._session_s

    def _wait(self, answer: Any) -> Any:
        """Wait for ZooKeeper's answer. Raises StoreLostError if it takes longer than the lead lasts."""
        try:
            return answer.get(timeout=max(0.0, self.leads_until - time.monotonic()))
        except TROUBLE as error:
            raise StoreLostError(f"ZooKeeper does not answer: {error!r}") from error

    def _path(self, member_id: str, under: str = "") -> str:
        # Prefixed, because ZooKeeper does not allow "." and ".." as names.
        return f"{under or self._members}/m-{quote(member_id, safe='')}"

    @staticmethod
    def _state_bytes(kept: Kept, epoch: int) -> bytes:
        return json.dumps(
            {
                "schema": _SCHEMA,
                "epoch": epoch,
                "life": kept.life,
                "revision": kept.revision,
                "forgotten_incarnation": kept.forgotten_incarnation,
            }
        ).encode()


def parts(change: Change, limit_bytes: int = _PART_BYTES) -> Iterator[Change]:
    """Split a change into transactions that ZooKeeper accepts, each with its revision; at least one.

    After only some of the parts, a reader sees members newer than the stored revision, and a revision that
    was never announced. A watcher that asks for later events therefore gets a snapshot.
    """
    revision, forgotten = change.revision, change.forgotten_incarnation
    events: list[MemberEvent] = []
    filled = 0
    for event in change.events:
        size = len(event_to_bytes(event)) + len(event.member.id) * 3
        if events and filled + size > limit_bytes:
            yield Change(revision, forgotten, tuple(events))
            events, filled = [], 0
        events.append(event)
        filled += size
    yield Change(revision, forgotten, tuple(events), change.removed)
    for record in change.records:
        yield Change(revision, forgotten, records=(record,))

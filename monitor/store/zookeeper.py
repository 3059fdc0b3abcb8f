"""The store in ZooKeeper: what its leader writes, and why nobody else can.

    ROOT/monitor/state            {"schema", "epoch", "life", "revision", "forgotten_incarnation"}
    ROOT/monitor/members/m-ID     the member's last event (eaas.rpc.v1.MemberEvent)
    ROOT/monitor/records/m-ID     what it left to whoever comes after it (eaas.rpc.v1.KeepRecordRequest)
    ROOT/monitor/election/c-N     one ephemeral node for each monitor (`monitor.store.candidate`)

Each write is a transaction that sets `state` at the version that its writer knows. A monitor that comes to
lead sets it first, with the next epoch, and reads the members after that: from then on the version is not
the one that its predecessor knows, and whatever that one still writes fails as a whole.
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
from monitor.life import MemberEvent
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
"""What kazoo raises when ZooKeeper says no, or nothing."""

_SCHEMA = 1
# Of a session, after the last answer: ZooKeeper counts from when it heard, which is later than the question.
_LEAD_SHARE = 2 / 3
# ZooKeeper takes messages below 1 MiB.
_PART_BYTES = 512 << 10
_READS_AT_ONCE = 256


class ZooKeeperStore:
    """Takes the lead: from now on no predecessor can write.

    To be made by whoever won the election, in the session that did.

    Args:
        client: Connected.
        root: Path of the cluster.
        session_s: Of the client.

    Raises:
        StoreError: What is kept there is damaged or of a newer version.
        StoreLostError: Another monitor took the lead meanwhile, or ZooKeeper does not answer.
    """

    def __init__(self, client: KazooClient, root: str, session_s: float) -> None:
        self._client = client
        # One question about the version at a time: the lead is confirmed by another thread than writes.
        self._asking = threading.Lock()
        self._state = f"{root}/monitor/state"
        self._members = f"{root}/monitor/members"
        self._records = f"{root}/monitor/records"
        self._session_s = session_s
        # Until the first answer there is time for a whole session.
        self._leads_until = time.monotonic() + session_s
        try:
            self._wait(client.ensure_path_async(self._members))
            self._wait(client.ensure_path_async(self._records))
            self._take_the_lead()
            self.kept = self._read()
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"ZooKeeper's {root}/monitor is damaged ({error}): delete that path, or give another "
                "monitor.zookeeper_root; members that live register anew and keep their incarnations"
            ) from error

    @property
    def leads_until(self) -> float:
        """Monotonic seconds until which ZooKeeper lets nobody else lead."""
        return self._leads_until

    @property
    def epoch(self) -> int:
        """How many times anybody has taken the lead."""
        return self._epoch

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
        self._epoch: int = state["epoch"] + 1
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
        """Asks whether this monitor leads still. Raises StoreLostError."""
        with self._asking:
            began = time.monotonic()
            _, stat = self._wait(self._client.get_async(self._state))
            if stat.version != self._version:
                raise StoreLostError("another monitor has taken the lead")
            self._heard(began)

    def write(self, change: Change) -> None:
        """Returns when ZooKeeper has the change. Raises StoreLostError."""
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
        """The session is the candidate's: it ends it."""

    def _commit(self, history: Kept, operations: list[tuple[str, str, bytes]]) -> None:
        with self._asking:
            self._commit_alone(history, operations)

    def _commit_alone(self, history: Kept, operations: list[tuple[str, str, bytes]]) -> None:
        began = time.monotonic()
        transaction = self._client.transaction()
        transaction.set_data(
            self._state, self._state_bytes(history, self._epoch), version=self._version
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
        self._leads_until = asked_at + _LEAD_SHARE * self._session_s

    def _wait(self, answer: Any) -> Any:
        """What ZooKeeper answers. Whoever waits longer than it leads has lost."""
        try:
            return answer.get(timeout=max(0.0, self._leads_until - time.monotonic()))
        except TROUBLE as error:
            raise StoreLostError(f"ZooKeeper does not answer as it should: {error!r}") from error

    def _path(self, member_id: str, under: str = "") -> str:
        # Prefixed, since "." and ".." are no names in ZooKeeper.
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
    """A change in pieces that ZooKeeper takes, each with its revision; at least one.

    A reader of some of them has members newer than it should, and a revision that nobody was told of: whoever
    asks for what happened since an earlier one gets a snapshot.
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

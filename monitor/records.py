"""Records in the monitor: state that a balancer stores for its successor of the same id. No I/O, no clock.

Each member has one record, which is replaced as a whole. Only the registered incarnation writes it. Versions
rise within an incarnation, and a later incarnation outranks every version of an earlier one. A late write of
a former incarnation, or of a call that was overtaken, therefore changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from eaas.log import get_logger
from eaas.net.message_validation import check
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["MOST_BYTES", "Records", "StaleRecordError"]

_log = get_logger(__name__)

MOST_BYTES = 512 << 10
"""Limit of a record, because ZooKeeper takes only messages below 1 MiB."""


class StaleRecordError(Exception):
    """A newer record of the member exists; the write is dropped."""


class Records:
    """Members' records for their successors, and which of them are not stored yet.

    Args:
        stored: Serialized records from the store, by member.
    """

    def __init__(self, stored: Iterable[tuple[str, bytes]] = ()) -> None:
        self._records: dict[str, pb.KeepRecordRequest] = {}
        for name, data in stored:
            try:
                record = pb.KeepRecordRequest.FromString(data)
                check(record)
            except (DecodeError, ValueError) as error:
                _log.warning("the record of %s is ignored: %s", name, error)
            else:
                self._records[name] = record
        self._pending: dict[str, pb.KeepRecordRequest] = {}
        self.kept = 0
        """Number of records that `keep` has accepted so far."""

    @property
    def pending(self) -> bool:
        """Whether records wait to be written to the store; the store writer then has work."""
        return bool(self._pending)

    def keep(self, record: pb.KeepRecordRequest) -> int:
        """Replace a balancer's record; the store writer's next write puts it into the store.

        Returns:
            `kept` after this record: the record survives once that many are stored.

        Raises:
            StaleRecordError: A record of a later incarnation or version exists.
        """
        known = self._records.get(record.id)
        now = (record.incarnation, record.version)
        if known is not None and (known.incarnation, known.version) >= now:
            raise StaleRecordError(
                f"{record.id} has stored version {known.version} of incarnation {known.incarnation}: "
                f"version {record.version} of incarnation {record.incarnation} is older"
            )
        self._records[record.id] = self._pending[record.id] = record
        self.kept += 1
        return self.kept

    def get(self, member_id: str) -> pb.KeepRecordRequest | None:
        """Return the newest record under an id, for the next balancer with that id; None without one."""
        return self._records.get(member_id)

    def take(self) -> tuple[tuple[str, bytes], ...]:
        """Hand the pending records to the store writer, for its next write; they are no longer pending."""
        pending, self._pending = self._pending, {}
        return tuple((name, record.SerializeToString()) for name, record in pending.items())

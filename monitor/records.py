"""What members leave to whoever comes after them under the same name. Pure: no I/O, no clock.

One record a member, replaced as a whole. The life that is registered writes; versions only rise within a
life, and a later life counts for more than any version of an earlier one. So what is late, of a life that is
over or of a call that was overtaken, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from eaas.log import get_logger
from eaas.message_check import check
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["MOST_BYTES", "Records", "StaleRecordError"]

_log = get_logger(__name__)

MOST_BYTES = 512 << 10
"""Of a record: ZooKeeper takes messages below 1 MiB."""


class StaleRecordError(Exception):
    """A newer record is there already."""


class Records:
    """The records, and which of them are not stored yet.

    Args:
        stored: Serialized records that the store has, by member.
    """

    def __init__(self, stored: Iterable[tuple[str, bytes]] = ()) -> None:
        self._records: dict[str, pb.KeepRecordRequest] = {}
        for name, data in stored:
            try:
                record = pb.KeepRecordRequest.FromString(data)
                check(record)
            except (DecodeError, ValueError) as error:
                _log.warning("what %s left is ignored: %s", name, error)
            else:
                self._records[name] = record
        self._pending: dict[str, pb.KeepRecordRequest] = {}
        self.kept = 0
        """How often anything was kept."""

    @property
    def pending(self) -> bool:
        """Whether there is anything to store."""
        return bool(self._pending)

    def keep(self, record: pb.KeepRecordRequest) -> int:
        """Replaces a member's record.

        Returns:
            `kept` of now: with that many stored it survives.

        Raises:
            StaleRecordError: One of a later life, or of a later version, is there.
        """
        known = self._records.get(record.id)
        now = (record.incarnation, record.version)
        if known is not None and (known.incarnation, known.version) >= now:
            raise StaleRecordError(
                f"{record.id} has left version {known.version} of incarnation {known.incarnation}: "
                f"version {record.version} of incarnation {record.incarnation} is older"
            )
        self._records[record.id] = self._pending[record.id] = record
        self.kept += 1
        return self.kept

    def get(self, member_id: str) -> pb.KeepRecordRequest | None:
        """A member's record; None where it has left none."""
        return self._records.get(member_id)

    def take(self) -> tuple[tuple[str, bytes], ...]:
        """What is to be stored: from now on it is no longer pending."""
        pending, self._pending = self._pending, {}
        return tuple((name, record.SerializeToString()) for name, record in pending.items())

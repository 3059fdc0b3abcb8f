"""Records: late writes and replaced writers change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.records import Records, StaleRecordError
from monitor.store.embedded import EmbeddedStore
from monitor.store.kept import Change
from monitor.store.zookeeper import parts


def record(data: bytes, version: int, incarnation: int = 1) -> pb.KeepRecordRequest:
    return pb.KeepRecordRequest(id="b", incarnation=incarnation, version=version, data=data)


def test_versions_rise_and_later_incarnations_outrank_earlier_ones() -> None:
    records = Records()
    assert records.get("b") is None
    assert records.keep(record(b"one", 7)) == 1
    for late in (record(b"old", 7), record(b"older", 6)):
        with pytest.raises(StaleRecordError, match="is older"):
            records.keep(late)
    assert records.keep(record(b"two", 1, incarnation=2)) == 2
    with pytest.raises(StaleRecordError):
        records.keep(record(b"of a former incarnation", 99, incarnation=1))
    found = records.get("b")
    assert found is not None
    assert found.data == b"two"


def test_records_are_stored_and_restored() -> None:
    records = Records()
    records.keep(record(b"one", 1))
    records.keep(record(b"two", 2))
    assert records.pending
    (stored,) = records.take()
    assert not records.pending
    again = Records([stored])
    found = again.get("b")
    assert found is not None
    assert found.data == b"two"
    assert not again.pending
    with pytest.raises(StaleRecordError):
        again.keep(record(b"late", 2))


def test_the_embedded_store_keeps_records(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    assert store.kept.records == ()
    store.write(Change(3, records=(("b", b"one"), ("c", b"other"))))
    store.write(Change(4, records=(("b", b"two"),)))
    store.write(Change(5))
    store.close()
    again = EmbeddedStore(tmp_path)
    assert again.kept.revision == 5
    assert again.kept.records == (("b", b"two"), ("c", b"other"))
    again.close()


def test_each_record_is_a_separate_zookeeper_message() -> None:
    found = list(parts(Change(9, records=(("b", b"x" * 500_000), ("c", b"y" * 500_000)))))
    assert [len(part.records) for part in found] == [0, 1, 1]
    assert {part.revision for part in found} == {9}

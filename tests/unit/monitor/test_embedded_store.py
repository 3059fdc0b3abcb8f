"""The file of the embedded store: damaged, newer, in use, full; the records that it keeps."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from eaas.errors import StoreError
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent
from monitor.records import Records, StaleRecordError
from monitor.store import Change
from monitor.store.embedded import EmbeddedStore
from monitor.store.zookeeper import parts


def event(revision: int, member_id: str) -> MemberEvent:
    member = Member(member_id, Role.EXPERT_SERVER, 1, "h", "h:1", MemberState.SERVING)
    return MemberEvent(revision, member, "why")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a store with two members."""
    store = EmbeddedStore(tmp_path)
    store.write(Change(2, 5, (event(1, "a"), event(2, "b"))))
    store.close()
    return tmp_path / "monitor.db"


def test_two_stores_are_two_histories_that_only_their_owner_can_read(tmp_path: Path) -> None:
    stores = [EmbeddedStore(tmp_path / name) for name in "ab"]
    assert stores[0].kept.life != stores[1].kept.life
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0
    for store in stores:
        store.close()


def test_a_file_in_use(file: Path) -> None:
    first = EmbeddedStore(file.parent)
    with pytest.raises(StoreError, match=f"{file} is in use by another monitor: stop that one"):
        EmbeddedStore(file.parent)
    first.close()
    EmbeddedStore(file.parent).close()


@pytest.mark.parametrize("at", [0, 20, 4096, None])
def test_a_damaged_file(file: Path, at: int | None) -> None:
    data = bytearray(file.read_bytes())
    if at is None:
        del data[len(data) // 2 :]
    else:
        data[at : at + 64] = os.urandom(64)
    file.write_bytes(data)
    with pytest.raises(StoreError, match=rf"{file} is damaged .*: move it away") as caught:
        EmbeddedStore(file.parent)
    assert "\n" not in str(caught.value)
    # The remedy in the error works.
    file.unlink()
    store = EmbeddedStore(file.parent)
    assert store.kept.events == ()
    store.close()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE members SET event = X'FFFF' WHERE id = 'a'", "is damaged"),
        ("UPDATE members SET event = X'1202106312' WHERE id = 'a'", "is damaged"),
        ("DELETE FROM history", "is damaged"),
        ("DROP TABLE members", "is damaged"),
        ("PRAGMA user_version = 2", r"was written by a newer version \(schema 2"),
    ],
)
def test_a_foreign_database(file: Path, statement: str, why: str) -> None:
    with sqlite3.connect(file) as line:
        line.execute(statement)
    line.close()
    with pytest.raises(StoreError, match=f"{file} {why}"):
        EmbeddedStore(file.parent)


def test_an_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"monitor.data_dir .*/file: .*; give another directory"):
        EmbeddedStore(tmp_path / "file")
    (tmp_path / "monitor.db").mkdir()
    with pytest.raises(StoreError, match=r"monitor.db cannot be opened: .*; give this user"):
        EmbeddedStore(tmp_path)


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

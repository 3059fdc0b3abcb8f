"""The file of the embedded store: damaged, newer, in use, full."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from eaas.errors import StoreError
from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent
from monitor.store import Change
from monitor.store.embedded import EmbeddedStore


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


def test_a_newer_file(file: Path) -> None:
    with sqlite3.connect(file) as line:
        line.execute("PRAGMA user_version = 2")
    line.close()
    with pytest.raises(StoreError, match=rf"{file} was written by a newer version \(schema 2"):
        EmbeddedStore(file.parent)


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
    "statement",
    [
        "UPDATE members SET event = X'FFFF' WHERE id = 'a'",
        "UPDATE members SET event = X'1202106312' WHERE id = 'a'",
        "DELETE FROM history",
        "DROP TABLE members",
    ],
)
def test_a_foreign_database(file: Path, statement: str) -> None:
    with sqlite3.connect(file) as line:
        line.execute(statement)
    line.close()
    with pytest.raises(StoreError, match=f"{file} is damaged"):
        EmbeddedStore(file.parent)


def test_an_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"monitor.data_dir .*/file: .*; give another directory"):
        EmbeddedStore(tmp_path / "file")
    (tmp_path / "monitor.db").mkdir()
    with pytest.raises(StoreError, match=r"monitor.db cannot be opened: .*; give this user"):
        EmbeddedStore(tmp_path)

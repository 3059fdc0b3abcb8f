"""The embedded store of the monitor: one SQLite file, written by one monitor at a time."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

from google.protobuf.message import DecodeError

from eaas.errors import StoreError
from monitor.store.kept import (
    Change,
    Kept,
    StoreLostError,
    event_from_bytes,
    event_to_bytes,
    new_life,
)

__all__ = ["EmbeddedStore"]

_FILE = "monitor.db"
# Version of these tables, which SQLite keeps in the file's header.
_SCHEMA = 1
_TABLES = (
    """
CREATE TABLE history (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    life INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    forgotten_incarnation INTEGER NOT NULL
)
""",
    """
CREATE TABLE members (
    id TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    event BLOB NOT NULL -- eaas.rpc.v1.MemberEvent
)
""",
    """
CREATE TABLE records (
    id TEXT PRIMARY KEY,
    record BLOB NOT NULL -- eaas.rpc.v1.KeepRecordRequest
)
""",
)


class EmbeddedStore:
    """The monitor's store in an SQLite file in a directory; created if missing.

    Args:
        directory: Created if missing. One monitor at a time uses it.

    Raises:
        StoreError: The store cannot be created, read or written, another monitor uses it, or its file is
            damaged or of a newer version.
    """

    leads_until = math.inf
    """Always inf, because the lock on the file lasts as long as the store is open."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"monitor.data_dir {directory}: {error.strerror}; give another directory"
            ) from error
        try:
            # One thread opens the file and another writes it.
            self._file = sqlite3.connect(
                self._path, timeout=0.0, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            self.kept = self._open()
        except sqlite3.Error as error:
            self._file.close()
            raise self._unusable(error) from error
        except (DecodeError, ValueError) as error:
            self._file.close()
            raise self._damaged(str(error)) from error
        except StoreError:
            self._file.close()
            raise

    def _open(self) -> Kept:
        # The lock lasts until the file is closed or the process ends.
        self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._file.execute("PRAGMA journal_mode = WAL")
        # Each write reaches the disk before it counts, so that no failure lets two events get one revision.
        # Writes are few, and no heartbeat waits for them.
        self._file.execute("PRAGMA synchronous = FULL")
        self._file.execute("BEGIN IMMEDIATE")
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA:
            raise StoreError(
                f"{self._path} was written by a newer version (schema {version}, this one knows {_SCHEMA}): "
                "start that version, or give another --data-dir"
            )
        if version == 0:
            return self._begin()
        (verdict,) = self._file.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(verdict)
        kept = self._read()
        self._file.execute("COMMIT")
        return kept

    def _begin(self) -> Kept:
        kept = Kept(life=new_life())
        for table in _TABLES:
            self._file.execute(table)
        self._file.execute("INSERT INTO history VALUES (1, ?, 0, 0)", (kept.life,))
        self._file.execute(f"PRAGMA user_version = {_SCHEMA}")
        self._file.execute("COMMIT")
        return kept

    def _read(self) -> Kept:
        row = self._file.execute(
            "SELECT life, revision, forgotten_incarnation FROM history"
        ).fetchone()
        if row is None:
            raise self._damaged("it has no history")
        rows = self._file.execute("SELECT event FROM members ORDER BY revision")
        life, revision, forgotten = row
        events = tuple(event for (data,) in rows if (event := event_from_bytes(data)))
        records = tuple(self._file.execute("SELECT id, record FROM records ORDER BY id"))
        return Kept(life, revision, forgotten, events, records)

    def write(self, change: Change) -> None:
        """Write a change of the membership; returns when it is on the disk. Raises StoreLostError."""
        try:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?)",
                ((e.member.id, e.revision, event_to_bytes(e)) for e in change.events),
            )
            self._file.executemany(
                "DELETE FROM members WHERE id = ?", ((member_id,) for member_id in change.removed)
            )
            self._file.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", change.records)
            self._file.execute(
                "UPDATE history SET revision = ?, forgotten_incarnation = ?",
                (change.revision, change.forgotten_incarnation),
            )
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreLostError(
                f"{self._path} cannot be written: {error}; free space or repair the disk, "
                "then start the monitor again"
            ) from error

    def close(self) -> None:
        """Close the SQLite file, which releases its lock."""
        self._file.close()

    def _unusable(self, error: sqlite3.Error) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(
                f"{self._path} is in use by another monitor: stop that one, or give another --data-dir"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            return self._damaged(str(error))
        return StoreError(
            f"{self._path} cannot be opened: {error}; give this user the right to write there, "
            "or another --data-dir"
        )

    def _damaged(self, how: str) -> StoreError:
        return StoreError(
            f"{self._path} is damaged ({' '.join(how.split())}): move it away and start again; "
            "live members register again and keep their incarnations"
        )

"""A checkpoint in a local directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.shard import LocalShard, Shard
from eaas.checkpoint.source import local_directory
from eaas.errors import NotACheckpointError

__all__ = ["LocalSource"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LocalSource:
    """A checkpoint in a local directory, as a `Source`.

    Args:
        directory: Its path, or a file:// URL.

    Raises:
        NotACheckpointError: There is no such directory.
    """

    is_remote = False
    digest = ""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = local_directory(os.fspath(directory))
        if not self.directory.is_dir():
            what = "is not a directory" if self.directory.exists() else "does not exist"
            raise NotACheckpointError(
                f"{self.directory} {what}: give the local directory of a downloaded Hugging Face "
                "checkpoint"
            )

    def __str__(self) -> str:
        return str(self.directory)

    def place(self, name: str) -> str:
        """Path of a file."""
        return str(self.directory / name)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none of that name."""
        path = self.directory / name
        return path.stat().st_size if path.is_file() else None

    def names(self) -> list[str]:
        """Sorted names of the files."""
        return sorted(os.listdir(self.directory))

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of a file. Raises OSError, or ValueError if the file ends before."""
        with (self.directory / name).open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                if not count:
                    raise ValueError(f"the file ends at byte {offset + done}")
                done += count

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Like `map`."""
        return map(work, items)

    def open_shard(self, name: str, header: ShardHeader) -> Shard:
        """Open a shard with a known header. Raises OSError, or ValueError if it has changed."""
        return LocalShard(self.directory / name, header)

    def others(self) -> Iterable[object]:
        """None: there is only this copy."""
        return ()

    def close(self) -> None:
        """Do nothing: open shards close with their last slice."""

"""A checkpoint in a local directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.shard import LocalShard, Shard
from eaas.checkpoint.source import NO_GGUF, local_directory
from eaas.errors import CheckpointError, NotACheckpointError
from eaas.hub_cache import complete_download

__all__ = ["LocalSource"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LocalSource:
    """A checkpoint in a local directory, as a `Source`.

    Args:
        directory: Its path, a file:// URL, or a name in the cache of huggingface_hub.

    Raises:
        NotACheckpointError: There is no such directory.
    """

    is_remote = False
    digest = ""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = local_directory(directory)
        if self.directory.is_dir():
            return
        if self.directory.suffix == ".gguf":
            raise NotACheckpointError(f"{self.directory} is GGUF: {NO_GGUF}")
        if self.directory.exists():
            raise NotACheckpointError(
                f"{self.directory} is a file: give its directory, {self.directory.parent}"
            )
        raise NotACheckpointError(
            f"{self.directory} does not exist: give the local directory of a downloaded Hugging Face "
            "checkpoint"
        )

    def __str__(self) -> str:
        return str(self.directory)

    def place(self, name: str) -> str:
        """Path of a file."""
        return str(self.directory / name)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none of that name.

        Raises CheckpointError: It is a link that leads nowhere, or no file.
        """
        path = self.directory / name
        if path.is_file():
            return path.stat().st_size
        if path.is_symlink():
            raise CheckpointError(self._leads_nowhere(path))
        if path.exists():
            raise CheckpointError(f"{path} is no file: put the checkpoint's {name} in its place")
        return None

    def _leads_nowhere(self, link: Path) -> str:
        target = link.parent / os.readlink(link)
        text = f"{link} is a link to {os.path.normpath(target)}, which is not there: "
        if target.parent.is_dir():
            return text + complete_download(str(self))
        # As in a container whose volume is a snapshot without the blobs.
        return text + (
            "mount the folder that holds both (of a cache of huggingface_hub the whole models--ORG--NAME), "
            "or copy the files instead of the links (cp -rL)"
        )

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

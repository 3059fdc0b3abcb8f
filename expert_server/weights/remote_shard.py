"""A shard on another machine: ranges are read ahead by several threads, adjacent ones together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.pieces import Look, Pause, at_once, pieces, unseen
from eaas.checkpoint.shard import Shard
from eaas.wire.frame import paste

__all__ = ["RangeReader", "RemoteShard", "runs"]


class RangeReader(Protocol):
    """Reads ranges of shards. Thread-safe."""

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of a shard."""

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Run a function in one of the threads that read."""


class _Run:
    """A read of adjacent tensors in progress, shared by the readers of its parts."""

    def __init__(self, begin: int, data: bytearray, coming: list[Future[None]]) -> None:
        self.begin = begin
        self.data = data
        self.coming = coming
        self.readers = 0


class RemoteShard(Shard):
    """A shard on other machines, with its header in memory here. One thread at a time.

    Args:
        name: Name of the file.
        place: Names the file in messages.
        header: Its header.
        reader: Reads the ranges.
        run_bytes: Limit of one read: adjacent tensors are read together up to it, larger ones in parts.
    """

    def __init__(
        self, name: str, place: str, header: ShardHeader, reader: RangeReader, run_bytes: int
    ) -> None:
        super().__init__(name, place, header)
        self._reader = reader
        self._run_bytes = run_bytes
        # Places requested and not read yet.
        self._coming: dict[tuple[int, int], _Run] = {}
        # Memory of finished runs, by size: touching new pages takes longer than copying.
        self._free: dict[int, list[bytearray]] = {}

    def prefetch(self, places: Sequence[tuple[int, int]], pause: Pause = at_once) -> None:
        """Request these places that were not requested before, adjacent ones together."""
        missing = [place for place in places if place not in self._coming]
        for neighbours in runs(missing, self._run_bytes):
            pause()
            begin, (last, count) = neighbours[0][0], neighbours[-1]
            size = last + count - begin
            free = self._free.get(size)
            data = free.pop() if free else bytearray(size)
            view = memoryview(data)
            coming = [
                self._reader.start(self._reader.read, self.name, begin + first, view[first:end])
                for first, end in pieces(size, self._run_bytes)
            ]
            run = _Run(begin, data, coming)
            for place in neighbours:
                self._coming[place] = run
                run.readers += 1

    def read_into(
        self, buffer: memoryview, offset: int, pause: Pause = at_once, look: Look = unseen
    ) -> None:
        """Fill a buffer from an offset of the file. Raises the errors of the reader."""
        place = offset, len(buffer)
        if not len(buffer):
            return
        if place not in self._coming:
            self.prefetch([place], pause)
        run = self._coming.pop(place)
        try:
            for part in run.coming:
                part.result()
        except BaseException:
            # Another attempt reads all of it again.
            self._coming = {p: other for p, other in self._coming.items() if other is not run}
            raise
        data = memoryview(run.data)[offset - run.begin :]
        for begin, end in pieces(len(buffer)):
            pause()
            paste(buffer, begin, data[begin:end])
            look(buffer[begin:end])
        run.readers -= 1
        if not run.readers:
            self._free.setdefault(len(run.data), []).append(run.data)


def runs(places: Sequence[tuple[int, int]], most_bytes: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Group adjacent places, (offset, count) each in ascending order, into runs of at most `most_bytes`.

    A larger place has a run of its own. Empty places are left out.
    """
    run: list[tuple[int, int]] = []
    for offset, count in places:
        if not count:
            continue
        if run and (offset != sum(run[-1]) or offset + count - run[0][0] > most_bytes):
            yield run
            run = []
        run.append((offset, count))
    if run:
        yield run

"""Memory in separate mappings: alignment, huge pages, and release."""

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eaas.memory import HugeBlocks, huge_memory

HUGE = 2 << 20


def flags_of(address: int) -> set[str]:
    """Flags of the mapping that contains an address (`VmFlags`; see proc(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, _, end = name.partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and name == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4097, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 4096])
def test_memory_is_aligned_zeroed_and_separate(nbytes: int) -> None:
    one, other = huge_memory(nbytes), huge_memory(nbytes)
    assert (one.shape, one.dtype) == ((nbytes,), torch.uint8)
    assert one.data_ptr() % (HUGE if nbytes >= HUGE else 64) == 0
    assert one.untyped_storage().nbytes() == nbytes
    assert not one.any()
    one.fill_(255)
    assert not other.any()


def test_zero_bytes() -> None:
    assert huge_memory(0).view(torch.float32).shape == (0,)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a Linux without huge pages"
)
def test_whole_huge_pages_are_huge_and_the_rest_is_not() -> None:
    large, small = huge_memory(2 * HUGE + 5000), huge_memory(5000)
    begin = large.data_ptr()
    assert "hg" in flags_of(begin)
    assert "hg" in flags_of(begin + 2 * HUGE - 1)
    assert "nh" in flags_of(begin + 2 * HUGE)
    assert "nh" in flags_of(begin + len(large) - 1)
    assert "nh" in flags_of(small.data_ptr())


class NoHugePages(mmap.mmap):
    """Like a Linux built without huge pages."""

    def madvise(self, *_arguments: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_linux_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    memory = huge_memory(HUGE + 1)
    assert memory.data_ptr() % HUGE == 0
    assert memory.fill_(1).sum() == HUGE + 1


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the mappings that are alive."""
    alive: list[int] = []

    class Counted(mmap.mmap):
        def __new__(cls, *arguments: int, **options: int) -> "Counted":
            made = super().__new__(cls, *arguments, **options)
            alive.append(len(made))
            return made

        def __del__(self) -> None:
            alive.remove(len(self))

    monkeypatch.setattr(mmap, "mmap", Counted)
    yield alive
    assert not alive


def test_memory_is_freed_with_the_last_view(mappings: list[int]) -> None:
    memory = huge_memory(HUGE)
    part = memory.view(torch.float32)[5:9]
    assert len(mappings) == 1
    del memory
    gc.collect()
    assert part.sum() == 0
    assert len(mappings) == 1
    del part
    assert not mappings


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, 64, 100_000, HUGE, 3 * HUGE // 2])
def test_blocks_are_side_by_side_aligned_and_zeroed(nbytes: int) -> None:
    blocks = HugeBlocks()
    one, other = blocks.allocate(nbytes), blocks.allocate(nbytes)
    assert other.data_ptr() - one.data_ptr() == -(-nbytes // 64) * 64
    assert one.data_ptr() % 64 == 0
    assert (one.shape, one.dtype) == ((nbytes,), torch.uint8)
    one.fill_(255)
    assert not other.any()


def test_a_block_between_others_returns_its_pages() -> None:
    blocks = HugeBlocks()
    size = 16 * HUGE + 100_000
    one, freed, other = (blocks.allocate(size).fill_(1) for _ in range(3))
    view = freed.view(torch.uint8)[5:]
    before = resident_bytes()
    del freed
    assert view.all()
    assert before - resident_bytes() < size // 2
    del view
    assert before - resident_bytes() > size // 2
    assert one.all()
    assert other.all()


def test_a_slab_is_freed_with_its_last_block(mappings: list[int]) -> None:
    blocks = HugeBlocks()
    one, other = blocks.allocate(5), blocks.allocate(5)
    assert len(mappings) == 1
    del blocks, one
    assert len(mappings) == 1
    del other
    gc.collect()
    assert not mappings


def test_a_large_block_has_a_mapping_of_its_own(mappings: list[int]) -> None:
    blocks = HugeBlocks()
    large, _none = blocks.allocate(200 << 20), blocks.allocate(0)
    assert len(mappings) == 1
    assert large.data_ptr() % HUGE == 0
    del large
    gc.collect()
    assert not mappings

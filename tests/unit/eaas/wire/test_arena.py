"""The arena: creation, attaching, refusals, closing."""

import errno
import gc
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eaas
from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.wire import Arena, SlotState
from eaas.wire.arena import SHM_DIRECTORY, arena_bytes
from eaas.wire.header import align
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES, RESULT_HEADER_BYTES, result_view
from helper_process import output_of

ROOT = Path(eaas.__file__).parents[1]
SLOTS, PAYLOAD, RESULT, INCARNATION = 3, 1000, 500, 2**40 + 5


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def shared() -> Iterator[Arena]:
    arena = Arena.create_shared(SLOTS, PAYLOAD, RESULT, INCARNATION)
    yield arena
    arena.close()


@pytest.fixture(params=["shared", "local"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    create = Arena.create_shared if request.param == "shared" else Arena.create_local
    arena = create(SLOTS, PAYLOAD, RESULT, INCARNATION)
    yield arena
    arena.close()


def test_nothing_in_an_arena_overlaps(arena: Arena) -> None:
    """Filling one part changes no other."""
    regions = [
        region
        for i in range(SLOTS)
        for region in (
            (arena.request_offset(i), REQUEST_HEADER_BYTES + PAYLOAD),
            (arena.result_offset(i), RESULT_HEADER_BYTES + RESULT),
        )
    ]
    assert arena.size == len(arena.buffer) == arena_bytes(SLOTS, PAYLOAD, RESULT)
    assert (arena.payload_capacity, arena.result_capacity) == (PAYLOAD, RESULT)
    for i in range(SLOTS):
        assert (arena.generation(i), arena.flags.load(i)) == (0, SlotState.FREE)
        arena.set_generation(i, 2**32 - 1)
        arena.flags.exchange(i, SlotState.OFFLINE)
    for doorbell in range(SLOTS + 1):
        arena.flags.interrupt(doorbell)
    head = arena.buffer[: regions[0][0]]
    for offset, length in regions:
        assert offset == align(offset)
        assert not any(arena.buffer[offset : offset + length])
        arena.buffer[offset : offset + length] = b"\xff" * length
    assert arena.buffer[: regions[0][0]] == head
    assert [arena.generation(i) for i in range(SLOTS)] == [2**32 - 1] * SLOTS
    assert [arena.flags.load(i) for i in range(SLOTS)] == [SlotState.OFFLINE] * SLOTS
    assert [arena.flags.seq(doorbell) for doorbell in range(SLOTS + 1)] == [1] * (SLOTS + 1)
    assert arena.incarnation == INCARNATION


@pytest.mark.parametrize("i", [-1, SLOTS])
def test_an_unknown_slot(arena: Arena, i: int) -> None:
    calls: list[Callable[[int], object]] = [
        arena.request_offset,
        arena.result_offset,
        arena.generation,
        lambda i: arena.set_generation(i, 1),
        arena.client_write_done,
        arena.server_offline,
    ]
    for call in calls:
        with pytest.raises(IndexError):
            call(i)


def test_a_wild_flag_can_be_taken_offline() -> None:
    arena = Arena.create_local(1, 64, 64, 1)
    flags_offset = 64 + 64
    arena.buffer[flags_offset : flags_offset + 4] = b"\xff" * 4
    assert arena.flags.load(0) == 2**32 - 1
    assert not arena.server_done(0)
    assert arena.server_offline(0)
    assert not arena.server_offline(0)
    assert arena.server_reclaim(0)
    arena.close()


def test_the_generation_is_read_after_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another core, weakly ordered, stores another one meanwhile."""
    arena = Arena.create_local(1, 64, 64, 1)
    flags = SimpleNamespace(fence=lambda: arena.set_generation(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(arena, "flags", flags)
        assert arena.generation(0) == 2
    arena.close()


# -- the file -------------------------------------------------------------------------------------


def test_the_file_is_private_and_nameless() -> None:
    """Whatever the umask is."""
    previous = os.umask(0o777)
    try:
        arena = Arena.create_shared(1, 64, 64, 1)
    finally:
        os.umask(previous)
    status = os.fstat(arena.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 0
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_slots_take_memory_when_they_are_allocated() -> None:
    arena = Arena.create_shared(4, 1 << 20, 1 << 20, 1)
    assert arena.size > 8 << 20

    def taken() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    assert taken() < 64 << 10
    arena.allocate(1, 2, 1 << 18, 1 << 18)
    assert 1 << 20 <= taken() < (1 << 20) + (64 << 10)
    arena.allocate(1, 2, 1 << 18, 1 << 18)
    assert taken() < (1 << 20) + (64 << 10)
    arena.close()


def test_the_file_cannot_get_a_name(shared: Arena) -> None:
    name = SHM_DIRECTORY / f"planted-{os.getpid()}"
    with pytest.raises(FileNotFoundError):
        # With src_dir_fd Python follows the link in /proc, as linkat(2) says for nameless files.
        os.link(f"/proc/self/fd/{shared.fd}", name, src_dir_fd=shared.fd)
    assert not name.exists()


def test_nothing_is_left_behind() -> None:
    names = set(os.listdir(SHM_DIRECTORY))
    descriptors = open_descriptors()
    arenas = [Arena.create_shared(SLOTS, PAYLOAD, RESULT, 1) for _ in range(5)]
    attached = [Arena.attach(os.getpid(), arena.fd, arena.size) for arena in arenas]
    assert set(os.listdir(SHM_DIRECTORY)) == names
    for arena in arenas + attached:
        arena.close()
        arena.close()
    assert open_descriptors() == descriptors


def test_full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 28: a clear error with what was asked and what is free, and no descriptor left."""

    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    descriptors = open_descriptors()
    with pytest.raises(SharedMemoryError, match=r"/dev/shm: asked for \d+ bytes, \d+ are free"):
        Arena.create_shared(SLOTS, PAYLOAD, RESULT, 1)
    assert open_descriptors() == descriptors


def test_more_memory_than_the_machine_has() -> None:
    room = os.statvfs(SHM_DIRECTORY)
    total = room.f_blocks * room.f_frsize
    if total == 0:
        pytest.skip("/dev/shm has no limit here")
    descriptors = open_descriptors()
    arena = Arena.create_shared(2, total, total, 1)
    with pytest.raises(SharedMemoryError, match="shm-size"):
        arena.allocate(0, 2, total, total)
    arena.close()
    assert os.statvfs(SHM_DIRECTORY).f_blocks == room.f_blocks
    assert open_descriptors() == descriptors


def test_no_shared_memory_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("eaas.wire.arena.SHM_DIRECTORY", tmp_path / "gone")
    with pytest.raises(SharedMemoryError, match="gone"):
        Arena.create_shared(1, 64, 64, 1)


# -- attaching ------------------------------------------------------------------------------------

VISITOR = """
import sys
from eaas.wire import Arena

pid, fd, size = map(int, sys.argv[1:])
arena = Arena.attach(pid, fd, size)
assert (arena.slots, arena.incarnation, arena.fd) == (3, 2**40 + 5, -1)
assert arena.generation(2) == 9
offset = arena.request_offset(2)
arena.buffer[offset : offset + 5] = b"hello"
assert arena.client_write_done(2)
arena.flags.ring(0)
arena.close()
"""


def test_another_process_attaches(shared: Arena) -> None:
    shared.set_generation(2, 9)
    output_of(sys.executable, "-c", VISITOR, os.getpid(), shared.fd, shared.size, cwd=ROOT)
    assert shared.flags.wait(0, SLOTS, SlotState.WRITTEN.mask, DOORBELL, -1, 0, 0) == [2]
    offset = shared.request_offset(2)
    assert shared.buffer[offset : offset + 5] == b"hello"


def test_an_attached_arena_outlives_its_creator() -> None:
    shared = Arena.create_shared(1, 64, 64, 1)
    attached = Arena.attach(os.getpid(), shared.fd, shared.size)
    shared.close()
    assert attached.client_write_done(0)
    attached.close()


@pytest.mark.parametrize("difference", [-4096, -1, 1, 4096])
def test_another_size_is_refused(shared: Arena, difference: int) -> None:
    with pytest.raises(SharedMemoryError, match="bytes"):
        Arena.attach(os.getpid(), shared.fd, shared.size + difference)


@pytest.mark.parametrize("size", [0, 1, 63])
def test_a_file_shorter_than_a_header_is_refused(size: int) -> None:
    fd = os.memfd_create("short")
    os.fchmod(fd, 0o600)
    os.truncate(fd, size)
    with pytest.raises(SharedMemoryError, match="bytes"):
        Arena.attach(os.getpid(), fd, size)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, struct.pack("<I", 0)),  # magic
        (4, struct.pack("<H", 2)),  # version
        (8, struct.pack("<I", SLOTS + 1)),
        (8, struct.pack("<I", 0)),
        (8, struct.pack("<I", 2**32 - 1)),
        (16, struct.pack("<Q", PAYLOAD + 64)),
        (24, struct.pack("<Q", 2**64 - 1)),
        # The sum would be right modulo 2**64.
        (16, struct.pack("<QQ", 2**64 - 64, RESULT + 1024 + 64)),
    ],
)
def test_an_inconsistent_header_is_refused(shared: Arena, offset: int, value: bytes) -> None:
    descriptors = open_descriptors()
    shared.buffer[offset : offset + len(value)] = value
    with pytest.raises(SharedMemoryError, match="/proc/"):
        Arena.attach(os.getpid(), shared.fd, shared.size)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666, 0o400])
def test_another_mode_is_refused(shared: Arena, mode: int) -> None:
    os.fchmod(shared.fd, mode)
    with pytest.raises(SharedMemoryError):
        Arena.attach(os.getpid(), shared.fd, shared.size)


def test_another_owner_is_refused(shared: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 29, if this process can open the file anyway (root)."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SharedMemoryError, match="user"):
        Arena.attach(os.getpid(), shared.fd, shared.size)


def test_a_pipe_is_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(SharedMemoryError, match="regular"):
        Arena.attach(os.getpid(), reader, 4096)
    os.close(reader)
    os.close(writer)


def test_a_closed_descriptor_is_a_lost_connection(shared: Arena) -> None:
    fd, size = shared.fd, shared.size
    shared.close()
    with pytest.raises(ConnectionLostError, match=f"/proc/{os.getpid()}/fd/{fd}"):
        Arena.attach(os.getpid(), fd, size)


def test_a_dead_process_is_a_lost_connection(shared: Arena) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    with pytest.raises(ConnectionLostError):
        Arena.attach(process.pid, shared.fd, shared.size)


# -- closing --------------------------------------------------------------------------------------


def test_use_after_close_is_an_error(arena: Arena) -> None:
    arena.close()
    assert arena.fd == -1
    with pytest.raises(ValueError, match="closed"):
        _ = arena.buffer
    with pytest.raises(ValueError, match="released"):
        arena.client_write_done(0)


def test_views_outlive_the_arena_and_then_free_it(arena: Arena) -> None:
    mapped = Path("/proc/self/maps").read_text().count("\n")
    view_TH = result_view(arena.buffer, arena.result_offset(1), 2, 3)
    view_TH[...] = 4.0
    arena.close()
    assert (view_TH == np.float32(4.0)).all()
    view_TH[0, 0] = 5.0
    assert view_TH[0, 0] == 5.0
    del view_TH
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("\n") <= mapped

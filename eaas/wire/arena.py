"""The arena: one block of memory with all slots of an expert server.

    0          header, 64 bytes: magic u32, version u16, 2 zeros, slots u32, 4 zeros,
               payload_capacity u64, result_capacity u64, incarnation u64, zeros
    64         generation of each slot, u32 each; padded to 64 bytes
    ...        flag of each slot, 64 bytes each
    ...        doorbells, 64 bytes each: doorbell 0 is the server's, doorbell 1 + i that of the
               connection whose first slot is i
    ...        the slots (see `eaas.wire.slot`), all of the same size

A shared arena is an unnamed file in /dev/shm: it cannot be replaced by a symlink, only its user can open it,
and it disappears with the last process that uses it, even after a crash. Slots have addresses for the largest
step, but take memory only when they are granted, and only for the tokens that their client asked for.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from pathlib import Path

from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.wire._flags import LINE_BYTES, Flags
from eaas.wire.header import (
    MAGIC,
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    VERSION,
    SlotState,
    align,
)

__all__ = ["SPIN_US", "Arena", "arena_bytes", "machine_id"]

SPIN_US = 20
"""Microseconds to poll flags before sleeping on a doorbell."""

SHM_DIRECTORY = Path("/dev/shm")
FILE_MODE = 0o600
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_HEADER = struct.Struct("<IHxxI4xQQQ24x")
_WORD = struct.Struct("<I")

# Constants, because attributes of an enum run Python code in each lookup.
_FREE, _WRITTEN, _DONE, _OFFLINE = SlotState


def _request_stride(payload_capacity: int) -> int:
    return REQUEST_HEADER_BYTES + align(payload_capacity)


def _result_stride(result_capacity: int) -> int:
    return RESULT_HEADER_BYTES + align(result_capacity)


def _flags_offset(slots: int) -> int:
    return -(-(_HEADER.size + slots * _WORD.size) // LINE_BYTES) * LINE_BYTES


def _doorbells_offset(slots: int) -> int:
    return _flags_offset(slots) + slots * LINE_BYTES


def _slots_offset(slots: int) -> int:
    return _doorbells_offset(slots) + (slots + 1) * LINE_BYTES


def arena_bytes(slots: int, payload_capacity: int, result_capacity: int) -> int:
    """Compute the size of an arena in bytes; `attach` refuses a file of another size."""
    slot_bytes = _request_stride(payload_capacity) + _result_stride(result_capacity)
    return _slots_offset(slots) + slots * slot_bytes


class Arena:
    """The request slots of one expert server, in shared memory, or in private memory for a remote client.

    Created by `create_shared`, `create_local` or `attach`. The flag of a slot says whether client or server
    owns it; only a flag orders reads and writes of the bytes. Methods that change a flag return whether the
    transition was allowed. Ring a doorbell (`flags.ring`) after changing a flag.

    Attributes:
        fd: File descriptor in the process that created the arena; -1 otherwise.
        size: Total bytes.
        slots: Number of slots.
        payload_capacity: Most bytes of a request's payload in a slot. A grant may have fewer (`allocate`).
        result_capacity: Most bytes of a result in a slot.
        request_stride: Bytes of a slot's request: header, payload, padding.
        result_stride: Bytes of a slot's result: header, result, padding.
        incarnation: Random number of the arena. After `attach`, compare it with the server's answer: process
            ids are reused, and other containers have the same ones.
        flags: Flags of the slots (flag i belongs to slot i) and doorbells.
    """

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        """Take ownership of a mapping with a valid header; callers use one of the class methods."""
        _, _, slots, payload_capacity, result_capacity, incarnation = _HEADER.unpack_from(mapping)
        self.fd = fd
        self.size = len(mapping)
        self.slots: int = slots
        self.payload_capacity: int = payload_capacity
        self.result_capacity: int = result_capacity
        self.incarnation: int = incarnation
        self.request_stride = _request_stride(payload_capacity)
        self.result_stride = _result_stride(result_capacity)
        self.flags = Flags(
            mapping, _flags_offset(slots), slots, _doorbells_offset(slots), slots + 1
        )
        self._mapping: mmap.mmap | None = mapping
        self._slots_offset = _slots_offset(slots)

    # -- creating and closing ---------------------------------------------------------------------

    @classmethod
    def create_shared(
        cls, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
    ) -> Arena:
        """Create an expert server's arena in /dev/shm, for processes of this user, with all slots FREE.

        The slots have no memory before `allocate`.

        Raises:
            SharedMemoryError: /dev/shm is missing or has too little space.
        """
        size = arena_bytes(slots, payload_capacity, result_capacity)
        fd = _create_file()
        try:
            os.ftruncate(fd, size)
            _take(fd, 0, _slots_offset(slots))
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            _write_header(mapping, slots, payload_capacity, result_capacity, incarnation)
            return cls(mapping, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create_local(
        cls, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
    ) -> Arena:
        """Create a client's arena in private memory, for a transport that copies slots (grpc or nixl)."""
        size = arena_bytes(slots, payload_capacity, result_capacity)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _write_header(mapping, slots, payload_capacity, result_capacity, incarnation)
        return cls(mapping, -1)

    @classmethod
    def attach(cls, pid: int, fd: int, size: int) -> Arena:
        """In a client (shm transport), map the arena of a server that has it open as descriptor `fd`.

        Raises:
            ConnectionLostError: The process or the descriptor does not exist.
            SharedMemoryError: The file is not an arena of that size, or belongs to another user.
        """
        path = f"/proc/{pid}/fd/{fd}"
        # Before opening it, because it may be a device of a process that only has the same pid.
        _check_file(path, _status(path), size)
        own_fd = _open_file(path)
        try:
            _check_file(path, os.fstat(own_fd), size)
            mapping = mmap.mmap(own_fd, size, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise _not_attached(path, error) from error
        finally:
            os.close(own_fd)
        try:
            _check_header(path, mapping)
        except SharedMemoryError:
            mapping.close()
            raise
        return cls(mapping, -1)

    def allocate(self, first: int, slots: int, payload_bytes: int, result_bytes: int) -> None:
        """Take memory for the beginnings of these slots' payloads and results, before a client gets them.

        It stays allocated. The other bytes of the slots must not be touched: without free memory in /dev/shm
        that would be a SIGBUS.

        Raises:
            SharedMemoryError: /dev/shm has too little space.
        """
        assert payload_bytes <= self.payload_capacity
        assert result_bytes <= self.result_capacity
        for slot in range(first, first + slots) if self.fd >= 0 else ():
            _take(self.fd, self.request_offset(slot), REQUEST_HEADER_BYTES + payload_bytes)
            _take(self.fd, self.result_offset(slot), RESULT_HEADER_BYTES + result_bytes)

    def close(self) -> None:
        """Release the arena's memory; every further use raises ValueError. Idempotent.

        NumPy views of the slots stay valid, and a thread in `flags.wait` ends with ValueError within 250 ms.
        The memory is freed with the last view.
        """
        if self._mapping is None:
            return
        self.flags.release()
        # A BufferError means that a view exists. The last view then frees the memory.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        self._mapping = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- layout -----------------------------------------------------------------------------------

    @property
    def buffer(self) -> mmap.mmap:
        """All bytes of the arena. Raises ValueError after `close`."""
        if self._mapping is None:
            raise ValueError("the arena is closed")
        return self._mapping

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Offsets of the flags, the doorbells, the generations and the slots, for compiled code."""
        slots = self.slots
        return _flags_offset(slots), _doorbells_offset(slots), _HEADER.size, self._slots_offset

    def request_offset(self, i: int) -> int:
        """Offset of slot i's request header in the arena; the payload follows."""
        self._check_slot(i)
        return self._slots_offset + i * (self.request_stride + self.result_stride)

    def result_offset(self, i: int) -> int:
        """Offset of slot i's result header in the arena; the result follows."""
        return self.request_offset(i) + self.request_stride

    def generation(self, i: int) -> int:
        """Read the generation of slot i's current or last connection; a change means that it lost the slot.

        Earlier reads of the slot happen before this read. If the generation still matches, their data
        therefore belongs to this connection (the reader's side of a sequence lock).
        """
        self._check_slot(i)
        self.flags.fence()
        (generation,) = _WORD.unpack_from(self.buffer, _HEADER.size + i * _WORD.size)
        return int(generation)

    def set_generation(self, i: int, generation: int) -> None:
        """Assign slot i to another connection; the server calls this while the slot is OFFLINE."""
        self._check_slot(i)
        _WORD.pack_into(self.buffer, _HEADER.size + i * _WORD.size, generation)

    def _check_slot(self, i: int) -> None:
        if not 0 <= i < self.slots:
            raise IndexError(f"slot {i} of {self.slots}")

    # -- transitions: each returns whether the slot's state allowed it ------------------------------

    def client_write_done(self, i: int) -> bool:
        """Hand a request to the server: FREE to WRITTEN, with release order for the written bytes.

        With grpc and nixl, the server repeats it in its own arena once the request has arrived.
        """
        return self.flags.compare_exchange(i, _FREE, _WRITTEN)

    def client_free(self, i: int) -> bool:
        """Free a slot for another request: DONE to FREE, after its result was read or is no longer wanted."""
        return self.flags.compare_exchange(i, _DONE, _FREE)

    def server_done(self, i: int) -> bool:
        """Hand a result to the client: WRITTEN to DONE, with release order for the written bytes.

        With grpc and nixl, the client repeats it in its own arena once the result has arrived.
        """
        return self.flags.compare_exchange(i, _WRITTEN, _DONE)

    def server_offline(self, i: int) -> bool:
        """Take a slot from its client: any state, even an invalid one, to OFFLINE; False if already so."""
        return self.flags.exchange(i, _OFFLINE) != _OFFLINE

    def server_reclaim(self, i: int) -> bool:
        """Give a slot to a new connection, after `set_generation`: OFFLINE to FREE; its client can write."""
        return self.flags.compare_exchange(i, _OFFLINE, _FREE)


def _write_header(
    mapping: mmap.mmap, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
) -> None:
    fields = (MAGIC, VERSION, slots, payload_capacity, result_capacity, incarnation)
    _HEADER.pack_into(mapping, 0, *fields)
    for slot in range(slots):
        _WORD.pack_into(mapping, _flags_offset(slots) + slot * LINE_BYTES, _FREE)


def _create_file() -> int:
    """Create an unnamed, empty file in /dev/shm."""
    try:
        # O_EXCL, so that the file cannot get a name later.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(SHM_DIRECTORY, flags, FILE_MODE)
        os.fchmod(fd, FILE_MODE)  # The umask may have removed bits.
    except OSError as error:
        raise SharedMemoryError(f"no shared memory in {SHM_DIRECTORY}: {error.strerror}") from error
    return fd


def _take(fd: int, offset: int, length: int) -> None:
    """Allocate bytes of a file in /dev/shm, where a write without free space is a SIGBUS."""
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise SharedMemoryError(f"{length} bytes of shared memory: {error.strerror}") from error
        space = os.statvfs(SHM_DIRECTORY)
        raise SharedMemoryError(
            f"{SHM_DIRECTORY}: asked for {length} bytes, {space.f_bavail * space.f_frsize} are free:"
            " free some, or mount it larger (docker run --shm-size)"
        ) from error


def machine_id() -> str:
    """Identify the running kernel, which all containers of a machine share; empty if it cannot be read.

    The pid of another machine's process names something else here.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise _not_attached(path, error) from error


def _open_file(path: str) -> int:
    try:
        # O_NONBLOCK, because a reused process id may have a pipe there.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _not_attached(path, error) from error


def _not_attached(path: str, error: OSError) -> ConnectionLostError | SharedMemoryError:
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        return ConnectionLostError(f"{path}: no such process or descriptor on this host")
    return SharedMemoryError(f"{path}: cannot be attached: {error.strerror}")


def _check_file(path: str, status: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SharedMemoryError(f"{path}: not a regular file")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != FILE_MODE:
        raise SharedMemoryError(
            f"{path}: user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o};"
            f" wanted user {os.geteuid()}, mode {FILE_MODE:o}"
        )
    if status.st_size != size or size < _HEADER.size:
        raise SharedMemoryError(f"{path}: {status.st_size} bytes, not {size}")


def _check_header(path: str, mapping: mmap.mmap) -> None:
    magic, version, slots, payload_capacity, result_capacity, _ = _HEADER.unpack_from(mapping)
    if magic != MAGIC:
        raise SharedMemoryError(f"{path}: not an arena (magic {magic:#x})")
    if version != VERSION:
        raise SharedMemoryError(f"{path}: protocol version {version}, this process has {VERSION}")
    size = arena_bytes(slots, payload_capacity, result_capacity)
    if slots < 1 or size != len(mapping):
        raise SharedMemoryError(f"{path}: {slots} slots need {size} bytes, not {len(mapping)}")

"""The arena: one block of memory with all the slots of one expert server.

    0          header, 64 bytes: magic u32, version u16, 2 zeros, slots u32, 4 zeros,
               payload_capacity u64, result_capacity u64, incarnation u64, zeros
    64         generation of each slot, u32 each; padded to 64 bytes
    ...        flag of each slot, 64 bytes each
    ...        bells, 64 bytes each: bell 0 is the server's, bell 1 + i that of the connection
               whose first slot is i
    ...        the slots (see `eaas.wire.slot`), all of one size

A shared arena is a file without a name in /dev/shm: nobody can plant a symlink in its place, only
its user can open it, and it vanishes with the last process that has it, however that one ends.
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
from eaas.wire._flags import Flags
from eaas.wire.header import MAGIC, REQUEST_HEADER_BYTES, RESULT_HEADER_BYTES, VERSION, align
from eaas.wire.states import TRANSITIONS, Action, SlotState

__all__ = ["Arena", "arena_bytes"]

SHM_DIRECTORY = Path("/dev/shm")
FILE_MODE = 0o600

_HEADER = struct.Struct("<IHxxI4xQQQ24x")
_LINE = 64
_WORD = struct.Struct("<I")

# The moves with one source state, as (source, target) of a compare-and-exchange.
_MOVES: dict[Action, tuple[SlotState, SlotState]] = {
    action: (source, target)
    for (source, action), target in TRANSITIONS.items()
    if action is not Action.SERVER_OFFLINE
}
# Looked up once: an enum's hash is computed in Python.
_CLIENT_WRITE_DONE = _MOVES[Action.CLIENT_WRITE_DONE]
_CLIENT_FREE = _MOVES[Action.CLIENT_FREE]
_SERVER_DONE = _MOVES[Action.SERVER_DONE]
_SERVER_RECLAIM = _MOVES[Action.SERVER_RECLAIM]


def _request_stride(payload_capacity: int) -> int:
    return REQUEST_HEADER_BYTES + align(payload_capacity)


def _result_stride(result_capacity: int) -> int:
    return RESULT_HEADER_BYTES + align(result_capacity)


def _flags_offset(slots: int) -> int:
    return _HEADER.size + align(slots * _WORD.size)


def _bells_offset(slots: int) -> int:
    return _flags_offset(slots) + slots * _LINE


def _slots_offset(slots: int) -> int:
    return _bells_offset(slots) + (slots + 1) * _LINE


def arena_bytes(slots: int, payload_capacity: int, result_capacity: int) -> int:
    """The size of an arena, in bytes."""
    slot_bytes = _request_stride(payload_capacity) + _result_stride(result_capacity)
    return _slots_offset(slots) + slots * slot_bytes


class Arena:
    """The slots of one server, in shared memory, or in private memory for a client on another host.

    Made by `create_shared`, `create_local` or `attach`. Reads and writes of the bytes have no order
    of their own: by its flag a slot belongs to the client or to the server, and the methods that
    move a flag say whether it was theirs to move. Whoever moved one rings a bell: `flags.ring`.

    Attributes:
        fd: Descriptor of the file, of the process that created it; -1 otherwise.
        size: Bytes in all.
        slots: Number of slots.
        payload_capacity: Bytes of a request's payload that fit a slot.
        result_capacity: Bytes of a result that fit a slot.
        request_stride: Bytes of a slot for the request: header, payload, padding.
        result_stride: Bytes of a slot for the result: header, result, padding.
        incarnation: The server's incarnation that the arena was created with. After `attach`,
            compare it with what the server said: a process id can be used again.
        flags: The slots' flags (flag i is slot i's) and the bells.
    """

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        """Takes over a mapping that begins with a valid header; use one of the class methods."""
        _, _, slots, payload_capacity, result_capacity, incarnation = _HEADER.unpack_from(mapping)
        self.fd = fd
        self.size = len(mapping)
        self.slots: int = slots
        self.payload_capacity: int = payload_capacity
        self.result_capacity: int = result_capacity
        self.incarnation: int = incarnation
        self.request_stride = _request_stride(payload_capacity)
        self.result_stride = _result_stride(result_capacity)
        self.flags = Flags(mapping, _flags_offset(slots), slots, _bells_offset(slots), slots + 1)
        self._mapping: mmap.mmap | None = mapping
        self._slots_offset = _slots_offset(slots)

    # -- making and closing -----------------------------------------------------------------------

    @classmethod
    def create_shared(
        cls, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
    ) -> Arena:
        """A new arena that other processes of this user can attach to, all slots FREE.

        Raises:
            SharedMemoryError: /dev/shm is missing or has not enough room.
        """
        size = arena_bytes(slots, payload_capacity, result_capacity)
        fd = _create_file(size)
        try:
            # Populated: the first touch of a page costs a fault, and must not cost it in a request.
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            _write_header(mapping, slots, payload_capacity, result_capacity, incarnation)
            return cls(mapping, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create_local(
        cls, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
    ) -> Arena:
        """The same in private memory: the client's side of a transport that copies slots."""
        size = arena_bytes(slots, payload_capacity, result_capacity)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _write_header(mapping, slots, payload_capacity, result_capacity, incarnation)
        return cls(mapping, -1)

    @classmethod
    def attach(cls, pid: int, fd: int, size: int) -> Arena:
        """The shared arena of another process, which said that it is its descriptor `fd`.

        Raises:
            ConnectionLostError: The process or its descriptor is not there (any more).
            SharedMemoryError: What is there is not an arena of that size, or not this user's own.
        """
        path = f"/proc/{pid}/fd/{fd}"
        own_fd = _open_file(path)
        try:
            _check_file(path, own_fd, size)
            mapping = mmap.mmap(own_fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(own_fd)
        _check_header(path, mapping)
        return cls(mapping, -1)

    def close(self) -> None:
        """Gives the memory back; every further use raises ValueError. Idempotent.

        Safe while NumPy views of the slots or a thread in `flags.wait` still live: they stay valid
        (the wait ends with ValueError within 250 ms), and the memory goes with the last of them.
        """
        if self._mapping is None:
            return
        self.flags.release()
        # BufferError: somebody has a view. Without our reference, the last view frees the memory.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        self._mapping = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- where things are -------------------------------------------------------------------------

    @property
    def buffer(self) -> mmap.mmap:
        """All the bytes. Raises ValueError once closed."""
        if self._mapping is None:
            raise ValueError("the arena is closed")
        return self._mapping

    def request_offset(self, i: int) -> int:
        """Where slot i's request header stands in the buffer; its payload follows the header."""
        self._check_slot(i)
        return self._slots_offset + i * (self.request_stride + self.result_stride)

    def result_offset(self, i: int) -> int:
        """Where slot i's result header stands in the buffer; its result follows the header."""
        return self.request_offset(i) + self.request_stride

    def generation(self, i: int) -> int:
        """The generation of the connection that slot i belongs, or last belonged, to.

        Whatever was read of the slot before this call was read before the generation: if it is still one's
        own, so was what was read. (The reader's side of a sequence lock.)
        """
        self._check_slot(i)
        self.flags.fence()
        (generation,) = _WORD.unpack_from(self.buffer, _HEADER.size + i * _WORD.size)
        return int(generation)

    def set_generation(self, i: int, generation: int) -> None:
        """Gives slot i to another connection; for the server, while the slot is OFFLINE."""
        self._check_slot(i)
        _WORD.pack_into(self.buffer, _HEADER.size + i * _WORD.size, generation)

    def _check_slot(self, i: int) -> None:
        if not 0 <= i < self.slots:
            raise IndexError(f"slot {i} of {self.slots}")

    # -- moves: each says whether the slot was in a state that allows it ---------------------------

    def client_write_done(self, i: int) -> bool:
        """FREE to WRITTEN: all that was written before is visible to who sees it."""
        return self.flags.compare_exchange(i, *_CLIENT_WRITE_DONE)

    def client_free(self, i: int) -> bool:
        """DONE to FREE: the result is not looked at any more."""
        return self.flags.compare_exchange(i, *_CLIENT_FREE)

    def server_done(self, i: int) -> bool:
        """WRITTEN to DONE: all that was written before is visible to who sees it."""
        return self.flags.compare_exchange(i, *_SERVER_DONE)

    def server_offline(self, i: int) -> bool:
        """Any state (a wild value too) to OFFLINE; False if it was OFFLINE already."""
        return self.flags.exchange(i, SlotState.OFFLINE) != SlotState.OFFLINE

    def server_reclaim(self, i: int) -> bool:
        """OFFLINE to FREE: the slot has a new connection, and a new generation."""
        return self.flags.compare_exchange(i, *_SERVER_RECLAIM)


def _write_header(
    mapping: mmap.mmap, slots: int, payload_capacity: int, result_capacity: int, incarnation: int
) -> None:
    fields = (MAGIC, VERSION, slots, payload_capacity, result_capacity, incarnation)
    _HEADER.pack_into(mapping, 0, *fields)


def _create_file(size: int) -> int:
    """A nameless file of `size` bytes in /dev/shm, all of them allocated."""
    try:
        # O_EXCL: it cannot be given a name later, either.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(SHM_DIRECTORY, flags, FILE_MODE)
    except OSError as error:
        raise SharedMemoryError(f"no shared memory in {SHM_DIRECTORY}: {error.strerror}") from error
    try:
        os.fchmod(fd, FILE_MODE)  # The umask may have taken bits away.
        # Not ftruncate: that succeeds past the free space, and the process dies of SIGBUS later.
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOSPC:
            raise SharedMemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
        room = os.statvfs(SHM_DIRECTORY)
        raise SharedMemoryError(
            f"{SHM_DIRECTORY}: asked for {size} bytes, {room.f_bavail * room.f_frsize} are free:"
            " free some, mount it larger (docker run --shm-size), or set fewer or smaller slots"
        ) from error
    return fd


def _open_file(path: str) -> int:
    try:
        # O_NONBLOCK: if the process id was used again, there may be a pipe.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ConnectionLostError(f"{path}: no such process or descriptor on this host") from error
    except OSError as error:
        raise SharedMemoryError(f"{path}: cannot be attached: {error.strerror}") from error


def _check_file(path: str, fd: int, size: int) -> None:
    status = os.fstat(fd)
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

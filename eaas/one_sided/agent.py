"""One-sided writes between the arenas of client and server, with NIXL (the nixl transport).

NIXL (UCX backend) picks the path to the peer: RDMA if there is a network card for it, else shared memory or
TCP. A write can carry a *note*; the peer receives it after the bytes are in its memory.

Transfers do not progress in the background, because NIXL's progress thread would delay writes by 8 to 16 ms.
Instead, `written` and `notes` also advance running transfers, in both directions.

Words: a *handle* is the address of an agent; the *description* of a region is the right to write there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from eaas.errors import ConnectionLostError
from eaas.log import get_logger

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["Agent", "Region", "nixl_version", "why_not"]

_log = get_logger(__name__)
_MEMORY = "DRAM"
_Token = TypeVar("_Token")


@functools.cache
def why_not() -> str:
    """Explain why NIXL is not available, with the remedy; empty if it is available."""
    # NIXL logs to stdout. Our errors have the same information.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        import nixl_cu12  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install 'expert-as-a-service[nixl]'"
    return ""


@functools.cache
def nixl_version() -> str:
    """The installed version of NIXL."""
    return importlib.metadata.version("nixl-cu12")


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """NIXL's exception types, which have no common base class."""
    from nixl_cu12 import _bindings

    of_module = vars(_bindings).values()
    own = (v for v in of_module if isinstance(v, type) and issubclass(v, Exception))
    return (*own, RuntimeError)


@dataclass(frozen=True, eq=False)
class Region:
    """A connection's slots in an arena, registered with NIXL as target and source of one-sided writes.

    Attributes:
        address: Address of its start in this process.
        description: Message that lets peers write into the region.
        view: Keeps the memory alive.
        registration: NIXL's handle.
    """

    address: int
    description: bytes
    view: npt.NDArray[np.uint8]
    registration: Any


class Agent(Generic[_Token]):
    """A NIXL agent of this process, which writes into the memory of any number of peers. Thread-safe.

    Args:
        name: Unique among all agents known to the peers.

    Raises:
        ConnectionLostError: NIXL cannot be started.
    """

    def __init__(self, name: str) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        self.name = name
        self._lock = threading.RLock()
        self._sending: list[tuple[str, Any, _Token]] = []
        try:
            self._nixl: Any = nixl_agent(
                name,
                nixl_agent_config(
                    enable_prog_thread=False,
                    sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                ),
            )
        except _errors() as error:
            raise ConnectionLostError(f"nixl: {error}") from error

    # -- setting up -----------------------------------------------------------------------------------

    def handle(self) -> bytes:
        """Serialized address of this agent; client and server exchange theirs to connect (`Join`)."""
        from nixl_cu12 import _bindings

        with self._lock:
            none = _bindings.nixlRegDList(_bindings.DRAM_SEG)
            return bytes(self._nixl.get_partial_agent_metadata(none, True))

    def register(self, buffer: mmap, spans: Sequence[tuple[int, int]]) -> Region:
        """Register parts of a buffer, so that peers can write into them. A write lies in one of them.

        Args:
            buffer: The buffer.
            spans: Start and end of each part, ascending.

        Raises:
            ConnectionLostError: NIXL refuses.
        """
        first = spans[0][0]
        view = np.frombuffer(buffer, np.uint8, spans[-1][1] - first, first)
        address = view.ctypes.data
        parts = [(address + start - first, end - start, 0, "") for start, end in spans]
        with self._lock:
            try:
                registration = self._nixl.register_memory(parts, _MEMORY)
                description = bytes(self._nixl.get_partial_agent_metadata(registration))
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {view.nbytes} bytes: {error}") from error
        return Region(address, description, view, registration)

    def deregister(self, region: Region) -> None:
        """Revoke a region, because its connection has ended. A peer on this host may still finish a write."""
        with self._lock:
            try:
                self._nixl.deregister_memory(region.registration)
            except _errors() as error:
                _log.warning("%s: memory not deregistered: %s", self.name, error)

    def learn(self, handle_or_description: bytes) -> str:
        """Load a peer's handle or a region's description into NIXL. Returns the peer's name.

        The peer must be trusted and have this version of NIXL: forged data can crash the process.

        Raises:
            ConnectionLostError: The data is not valid.
        """
        with self._lock:
            try:
                name = self._nixl.add_remote_agent(handle_or_description)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: the peer's handle: {error}") from error
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def connect(self, peer: str) -> None:
        """Start to connect to a peer (after `learn`), before any write. Raises ConnectionLostError."""
        with self._lock:
            try:
                self._nixl.make_connection(peer)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error

    # -- writing --------------------------------------------------------------------------------------

    def write(
        self, peer: str, source: int, target: int, length: int, token: _Token, note: bytes = b""
    ) -> None:
        """Start to write `length` bytes from address `source` into the peer's memory at address `target`.

        Do not use either address until `written` returns the token. The note arrives after the bytes.

        Raises:
            ConnectionLostError: The connection is lost, or an address is in no region.
        """
        with self._lock:
            nixl = self._nixl
            if nixl is None:
                raise ConnectionLostError("nixl: closed")
            try:
                transfer = nixl.initialize_xfer(
                    "WRITE",
                    nixl.get_xfer_descs([(source, length, 0)], _MEMORY),
                    nixl.get_xfer_descs([(target, length, 0)], _MEMORY),
                    peer,
                    note,
                )
                nixl.transfer(transfer)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error
            self._sending.append((peer, transfer, token))

    def note(self, peer: str, note: bytes) -> None:
        """Send a note to a peer after the writes that `written` returned. Raises ConnectionLostError."""
        with self._lock:
            if self._nixl is None:
                raise ConnectionLostError("nixl: closed")
            try:
                self._nixl.send_notif(peer, note)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error

    def written(self) -> list[tuple[_Token, str]]:
        """Return writes that ended since the last call, as (token, error); the error is empty for success."""
        with self._lock:
            ended: list[tuple[_Token, str]] = []
            in_progress = []
            for peer, transfer, token in self._sending:
                state, why = "ERR", ""
                try:
                    state = self._nixl.check_xfer_state(transfer)
                except _errors() as error:
                    why = str(error)
                if state == "PROC":
                    in_progress.append((peer, transfer, token))
                else:
                    self._release(transfer)
                    ended.append((token, "" if state == "DONE" else why or "nixl: failed"))
            self._sending = in_progress
            return ended

    def notes(self) -> list[tuple[str, bytes]]:
        """Return peers' notes since the last call, as (sender, note). Raises ConnectionLostError."""
        with self._lock:
            if self._nixl is None:
                return []
            try:
                found = self._nixl.get_new_notifs()
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error
        return [(peer, note) for peer, notes in found.items() for note in notes]

    def sending(self) -> bool:
        """Whether writes are in progress: their memory is in use, and `written` must be called again."""
        return bool(self._sending)

    # -- ending ---------------------------------------------------------------------------------------

    def forget(self, peer: str) -> None:
        """Disconnect from a peer and abandon the writes to it. Does nothing for an unknown peer."""
        with self._lock:
            for to, transfer, _ in self._sending:
                if to == peer:
                    self._release(transfer)
            self._sending = [entry for entry in self._sending if entry[0] != peer]
            try:
                self._nixl.remove_remote_agent(peer)
            except _errors() as error:
                _log.debug("%s: %s not forgotten: %s", self.name, peer, error)

    def close(self) -> None:
        """Disconnect the agent from all peers; later calls of `notes` return nothing. Idempotent."""
        with self._lock:
            for _, transfer, _ in self._sending:
                self._release(transfer)
            self._sending = []
            self._nixl = None

    def _release(self, transfer: Any) -> None:
        try:
            transfer.release()
        except _errors() as error:
            _log.debug("%s: a write was abandoned: %s", self.name, error)

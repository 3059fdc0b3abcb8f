"""One-sided writes between two processes, by NIXL.

NIXL (its UCX backend) takes what reaches the peer: RDMA where there is a network card for it, shared
memory or TCP elsewhere. A write can carry a *note*: the peer gets it after the bytes are in its memory.

Nothing happens by itself: `written` and `notes` also move what is under way, ours and the peers'. NIXL has a
progress thread of its own, but it makes a write 8 to 16 ms late.

Words: a *handle* tells how to reach an agent, a *description* of a region is the right to write there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
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
    """Why there are no one-sided writes here, with the remedy; empty where there are."""
    # Its own lines come to stdout, and each of our errors has one of its own.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        import nixl_cu12  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install 'expert-as-a-service[nixl]'"
    return ""


@functools.cache
def nixl_version() -> str:
    """The version that is installed."""
    return importlib.metadata.version("nixl-cu12")


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """NIXL's exceptions: they have no root of their own."""
    from nixl_cu12 import _bindings

    of_module = vars(_bindings).values()
    own = (v for v in of_module if isinstance(v, type) and issubclass(v, Exception))
    return (*own, RuntimeError)


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a buffer that peers may write into, and that may be written from.

    Attributes:
        address: Where it begins, in this process.
        description: For the peers.
        view: Keeps the memory where it is.
        registration: NIXL's.
    """

    address: int
    description: bytes
    view: npt.NDArray[np.uint8]
    registration: Any


class Agent(Generic[_Token]):
    """One end of any number of pairs. Methods may be called from several threads.

    Args:
        name: Unique among all agents that this one's peers know.

    Raises:
        ConnectionLostError: NIXL cannot be started here.
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
        """How to reach this agent."""
        from nixl_cu12 import _bindings

        with self._lock:
            none = _bindings.nixlRegDList(_bindings.DRAM_SEG)
            return bytes(self._nixl.get_partial_agent_metadata(none, True))

    def register(self, buffer: mmap, start: int, end: int) -> Region:
        """Let peers write into `buffer[start:end]`. Raises ConnectionLostError where NIXL refuses."""
        view = np.frombuffer(buffer, np.uint8, end - start, start)
        address = view.ctypes.data
        with self._lock:
            try:
                registration = self._nixl.register_memory([(address, end - start, 0, "")], _MEMORY)
                description = bytes(self._nixl.get_partial_agent_metadata(registration))
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {end - start} bytes: {error}") from error
        return Region(address, description, view, registration)

    def deregister(self, region: Region) -> None:
        """Take that back. Nobody writes there any more, but for what a peer on this host has begun."""
        with self._lock:
            try:
                self._nixl.deregister_memory(region.registration)
            except _errors() as error:
                _log.warning("%s: memory not deregistered: %s", self.name, error)

    def learn(self, handle_or_description: bytes) -> str:
        """Take in what a peer said of itself. Returns the peer's name.

        Only from a peer that is trusted, and has this version of NIXL: what was forged can crash it.

        Raises:
            ConnectionLostError: It is not what an agent says.
        """
        with self._lock:
            try:
                name = self._nixl.add_remote_agent(handle_or_description)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: the peer's handle: {error}") from error
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def connect(self, peer: str) -> None:
        """Begin to connect to a peer that was learnt of. Raises ConnectionLostError."""
        with self._lock:
            try:
                self._nixl.make_connection(peer)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error

    # -- writing --------------------------------------------------------------------------------------

    def write(
        self, peer: str, source: int, target: int, length: int, token: _Token, note: bytes = b""
    ) -> None:
        """Begin to write `length` bytes from address `source` to the peer's address `target`.

        Both stay as they are until `written` gives the token back; the note leaves after the bytes arrived.

        Raises:
            ConnectionLostError: The peer is gone, or the addresses are in no region.
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
        """Send a note alone. It overtakes no write that was given back before. Raises ConnectionLostError."""
        with self._lock:
            if self._nixl is None:
                raise ConnectionLostError("nixl: closed")
            try:
                self._nixl.send_notif(peer, note)
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error

    def written(self) -> list[tuple[_Token, str]]:
        """Writes that ended since the last call: their tokens, and what went wrong (empty: nothing)."""
        with self._lock:
            ended: list[tuple[_Token, str]] = []
            under_way = []
            for peer, transfer, token in self._sending:
                state, why = "ERR", ""
                try:
                    state = self._nixl.check_xfer_state(transfer)
                except _errors() as error:
                    why = str(error)
                if state == "PROC":
                    under_way.append((peer, transfer, token))
                else:
                    self._release(transfer)
                    ended.append((token, "" if state == "DONE" else why or "nixl: failed"))
            self._sending = under_way
            return ended

    def notes(self) -> list[tuple[str, bytes]]:
        """Notes that came since the last call, each with its sender's name. Raises ConnectionLostError."""
        with self._lock:
            if self._nixl is None:
                return []
            try:
                found = self._nixl.get_new_notifs()
            except _errors() as error:
                raise ConnectionLostError(f"nixl: {error}") from error
        return [(peer, note) for peer, notes in found.items() for note in notes]

    def sending(self) -> bool:
        """Whether writes are under way."""
        return bool(self._sending)

    # -- ending ---------------------------------------------------------------------------------------

    def forget(self, peer: str) -> None:
        """Disconnect from a peer; writes that are under way are given up. Does nothing for a stranger."""
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
        """Disconnect from everybody; `notes` are empty from now on. Idempotent."""
        with self._lock:
            for _, transfer, _ in self._sending:
                self._release(transfer)
            self._sending = []
            self._nixl = None

    def _release(self, transfer: Any) -> None:
        try:
            transfer.release()
        except _errors() as error:
            _log.debug("%s: a write was given up: %s", self.name, error)

"""Transport `nixl`: both ends write into each other's memory (RDMA, shared memory or TCP).

The arena is the client's own memory. The client writes a request from its slot into the server's slot, and a
notification then sets flag and doorbell there. The server writes the result into the client's slot, and its
notification sets flag and doorbell here. The set-up follows EaaS, figure 7, over a gRPC stream that then
serves as the liveness check.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from attention_client.connections.transports.granted import MirrorLink, disconnect
from eaas.errors import ConnectionLostError
from eaas.log import get_logger
from eaas.one_sided import Agent, Poller, Region, nixl_version
from eaas.one_sided.slots import READY, SlotMemory, pack_note, slot_spans, unpack_note
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena, SlotState

__all__ = ["open_nixl"]

_log = get_logger(__name__)
# Timeout of each step of the set-up, and longest wait for the last writes before Disconnect.
_JOIN_S = 5.0
_DRAIN_S = 0.5
_CLOSE_S = 2.0
_POLL_S = 0.0005
# Longest pause between two polls while an answer is due.
_PAUSE_MOST_US = 1000
# After this long without traffic the server polls so rarely that a write needs a wake-up message.
_SILENCE_S = 0.004


class _OneSidedLink(MirrorLink):
    """The client's end of a nixl connection. Its thread reads the stream; a shared thread polls all links."""

    transport = "nixl"

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(granted, channel, on_lost)
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        self._asked: set[int] = set()
        self._spoke_at = 0.0
        self._region: Region | None = None
        self._outbox: queue.SimpleQueue[pb.JoinRequest | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[pb.JoinResponse | str] = queue.SimpleQueue()
        self._agent: Agent[int] = Agent(granted.connection_id)
        # The stream has no deadline; keepalive pings detect a dead server.
        self._stream = self._service.Join(iter(self._outbox.get, None))
        self._receiver = threading.Thread(target=self._receive, name="nixl-link", daemon=True)
        self._receiver.start()
        try:
            self._region = self._agent.register(
                self.arena.buffer,
                slot_spans(
                    self.arena, 0, granted.slots, self.payload_capacity, self.result_capacity
                ),
            )
            self._own = SlotMemory.of(self.arena, self._region)
            self._join(self._own.message(self._region))
        except ConnectionLostError:
            self.close()
            self.arena.close()
            raise
        _links().add(self)

    # -- set-up --------------------------------------------------------------------------------------

    def _join(self, memory: pb.SlotMemory) -> None:
        self._outbox.put(
            pb.JoinRequest(
                connection_id=self._connection_id,
                nixl=nixl_version(),
                handle=self._agent.handle(),
            )
        )
        self._server = self._agent.learn(self._next().handle)
        self._agent.connect(self._server)
        self._outbox.put(pb.JoinRequest(memory=memory))
        theirs = self._next().memory
        self._agent.learn(theirs.description)
        self._theirs = SlotMemory.read(theirs)
        # Wait for a first round trip, after which each end has seen that the other is ready.
        self._agent.note(self._server, READY)
        deadline = time.monotonic() + _JOIN_S
        while not self._ready:
            self.poll()
            if not self._inbox.empty():
                self._next()
            if time.monotonic() > deadline:
                raise ConnectionLostError(f"nixl: the server is not ready after {_JOIN_S:g} s")
            time.sleep(_POLL_S)

    def _next(self) -> pb.JoinResponse:
        try:
            response = self._inbox.get(timeout=_JOIN_S)
        except queue.Empty:
            raise ConnectionLostError(
                f"nixl: the server did not answer a step of the set-up in {_JOIN_S:g} s"
            ) from None
        if isinstance(response, str):
            raise ConnectionLostError(response)
        return response

    def _receive(self) -> None:
        reason = "the server ended the stream"
        try:
            for response in self._stream:
                self._inbox.put(response)
        except grpc.RpcError as error:
            reason = f"stream: {error.code().name}: {error.details()}"
        self._outbox.put(None)
        self._inbox.put(reason)
        if not self._closed:
            self._on_lost(reason)

    # -- exchange -------------------------------------------------------------------------------------

    def notify(self, slot: int) -> None:
        begin, end = self.request_span(slot)
        length = end - begin
        self._asked.add(slot)
        silent_s = time.monotonic() - self._spoke_at
        self._spoke_at = time.monotonic()
        try:
            self._agent.write(
                self._server,
                self._own.request(slot),
                self._theirs.request(slot),
                length,
                slot,
                pack_note(slot, length),
            )
        except ConnectionLostError as error:
            self._on_lost(str(error))
        if silent_s > _SILENCE_S:
            self._outbox.put(pb.JoinRequest())
        _links().wake()

    @property
    def waits(self) -> bool:
        """Whether a request awaits its answer, so that the shared thread has to poll this link."""
        return bool(self._asked)

    def poll(self) -> bool:
        """Handle finished writes and notified answers, waking their layer calls. Returns whether any came."""
        try:
            ended = self._agent.written()
            notes = self._agent.notes()
            for _, why in ended:
                if why:
                    raise ConnectionLostError(why)
            for _, note in notes:
                self._take_note(note)
        except (ConnectionLostError, ValueError) as error:
            self._asked.clear()
            self._on_lost(str(error))
            return False
        return bool(ended or notes)

    def _take_note(self, note: bytes) -> None:
        if note == READY:
            self._ready = True
            return
        slot, length = unpack_note(note)
        with self._lock:
            if self._closed:
                return
            if slot >= self.slots or self.arena.flags.load(slot) != SlotState.WRITTEN:
                raise ValueError(
                    f"{length} bytes in slot {slot} of {self.slots}, which has no request"
                )
            self._asked.discard(slot)
            self._spoke_at = time.monotonic()
            self.arena.server_done(slot)
            self.arena.flags.ring(self.reply_doorbell)

    # -- close ----------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + _DRAIN_S
        while self._agent.sending() and time.monotonic() < deadline:
            self._agent.written()
            time.sleep(_POLL_S)
        # The server grants the slots to others at once, so send no Disconnect while a write may still arrive.
        sending = self._agent.sending()
        disconnected = not sending and disconnect(self._service, self._connection_id)
        _links().remove(self)
        self._outbox.put(None)
        self._stream.cancel()
        self._receiver.join(_CLOSE_S)
        self._agent.close()
        if self._region is not None and not disconnected:
            _park(self.arena, self._region)


class _Links:
    """Polls all nixl links of this process that await an answer, in one thread; sleeps if none does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: tuple[_OneSidedLink, ...] = ()
        self._poller = Poller("nixl", self._poll, self._busy, _PAUSE_MOST_US)

    def add(self, link: _OneSidedLink) -> None:
        with self._lock:
            self._links = (*self._links, link)

    def remove(self, link: _OneSidedLink) -> None:
        with self._lock:
            self._links = tuple(other for other in self._links if other is not link)

    def wake(self) -> None:
        self._poller.wake()

    def _busy(self) -> bool:
        return any(link.waits for link in self._links)

    def _poll(self) -> bool:
        return any([link.poll() for link in self._links if link.waits])


_all_links: _Links | None = None
_all_links_lock = threading.Lock()


def _links() -> _Links:
    global _all_links
    with _all_links_lock:
        if _all_links is None:
            _all_links = _Links()
        return _all_links


# -- memory that servers may still write into ------------------------------------------------------


class _Parked(NamedTuple):
    """The arena of a closed connection that a server may still write into; `view` reserves its addresses."""

    arena: Arena
    mapping: mmap.mmap
    view: Any

    def give_pages_back(self) -> None:
        try:
            _ = self.arena.buffer
        except ValueError:  # The arena is closed, so nobody reads it any more.
            self.mapping.madvise(mmap.MADV_DONTNEED)


# A paused server on this host may write a last answer long after its client closed. Nothing else may use
# these addresses, so they stay reserved; only their pages are freed.
_parked: list[_Parked] = []


def _park(arena: Arena, region: Region) -> None:
    _parked.append(_Parked(arena, arena.buffer, region.view))


def open_nixl(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> _OneSidedLink:
    """Open a nixl link: exchange memory handles with the server (see `Opener`)."""
    for parked in tuple(_parked):
        parked.give_pages_back()
    return _OneSidedLink(granted, channel, on_lost)

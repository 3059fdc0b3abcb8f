"""The expert server's end of the nixl transport: clients write into the arena, it writes results into theirs.

To the loop it is one more client. A network card's write wakes no futex, so a thread polls. It turns a
client's notification, which arrives after the client's bytes, into a flag and a doorbell. It turns a DONE
flag into a write and a notification.

A connection ends with its stream or with its grant. A write that the client began may still arrive, so the
slots stay reserved until the client confirms that no write is under way (`leave`, or the same process
connects again), or for `GRACE_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc

from eaas.errors import ConnectionLostError
from eaas.log import get_logger
from eaas.one_sided import Agent, Poller, Region, nixl_version, why_not
from eaas.one_sided.slots import READY, SlotMemory, pack_note, slot_spans, unpack_note
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES
from expert_server.transports.endpoint import Endpoint
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["GRACE_S", "NixlEndpoint"]

_log = get_logger(__name__)
_CLIENT_ENDED = "the client ended the stream"
GRACE_S = 5.0
"""How long slots stay reserved when their client may still be writing."""
# The longest pause. A client that writes after a silence wakes the poller through its stream.
_PAUSE_MOST_US = 50_000
# The shortest and the longest pause while a request is computed.
_COMPUTING_US = (50, 1000)


@dataclass(eq=False)
class _Peer:
    """A client connected by nixl. Its agent's name is the connection's id."""

    grant: Grant
    region: Region
    hold: ExitStack
    slots: SlotMemory
    results: SlotMemory | None = None
    ready: bool = False
    sending: set[int] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)
    reason: str = ""

    @property
    def name(self) -> str:
        return self.grant.connection_id


# A write's token: its client, the slot in the arena, the bytes.
_ServerAgent = Agent[tuple[_Peer, int, int]]


class NixlEndpoint(Endpoint):
    """Serves `ExpertService.Join`, for clients of the nixl transport. The first one starts NIXL."""

    def __init__(self, arena: Arena, table: SlotTable) -> None:
        super().__init__(arena, table)
        self._lock = threading.RLock()
        self._agent: _ServerAgent | None = None
        self._poller: Poller | None = None
        self._peers: dict[str, _Peer] = {}
        # Reserved slots: end of the reservation, grant, and the stack that releases them.
        self._held: list[tuple[float, Grant, ExitStack]] = []

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Return the handler of Join."""
        join = grpc.stream_stream_rpc_method_handler(
            self.join, pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
        )
        service = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
        return (grpc.method_handlers_generic_handler(service, {"Join": join}),)

    # -- joining and leaving --------------------------------------------------------------------------

    def join(
        self, requests: Iterator[pb.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.JoinResponse]:
        """Serve the stream of a client's connection until either side ends it; requests do not pass here.

        The first messages exchange the memory that each side writes into, later ones only wake the poller.
        """
        if missing := why_not():
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no nixl here: {missing}")
        first = next(requests, None)
        grant = self._table.get(first.connection_id) if first is not None else None
        if grant is None or first is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unknown connection: connect first")
            return
        try:
            if first.nixl != nixl_version():
                raise ConnectionLostError(f"NIXL {first.nixl}, this server has {nixl_version()}")
            agent, peer = self._mirror(grant, first.handle)
            # gRPC may abandon this generator when the client disconnects.
            if not context.add_callback(lambda: self._end(peer, _CLIENT_ENDED)):
                self._end(peer, _CLIENT_ENDED)
                return
            yield pb.JoinResponse(handle=agent.handle())
            second = next(requests, None)
            if second is not None:
                self._map_results(agent, peer, second.memory)
                yield pb.JoinResponse(memory=peer.slots.message(peer.region))
                threading.Thread(
                    target=self._listen, args=(grant, requests), name="joined", daemon=True
                ).start()
                peer.ended.wait()
        except ConnectionLostError as error:
            _log.warning("%s: connection ended: %s", grant.client_id, error)
            self._table.revoke(grant.connection_id)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._end(peer, _CLIENT_ENDED)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, peer.reason)

    def _listen(self, grant: Grant, requests: Iterator[pb.JoinRequest]) -> None:
        """Wake the polling thread for each message: the client announces a write after a silence."""
        try:
            for _ in requests:
                if (poller := self._poller) is not None:
                    poller.wake()
        except grpc.RpcError as error:
            _log.debug("%s: stream ended: %s", grant.client_id, error)

    def _mirror(self, grant: Grant, handle: bytes) -> tuple[_ServerAgent, _Peer]:
        """Learn a client's NIXL agent, and register the client's slots for writes; the poller serves it."""
        with self._lock:
            if self._agent is None:
                self._agent = Agent(f"expert-server-{self._arena.incarnation}")
                self._poller = Poller("nixl", self._poll, self._busy, _PAUSE_MOST_US, self._pause)
            agent = self._agent
            if grant.connection_id in self._peers:
                raise ConnectionLostError("joined twice")
            name = agent.learn(handle)
            if name != grant.connection_id:
                # Notifications carry only the name, so they would count as another client's.
                if name not in self._peers:
                    agent.forget(name)
                raise ConnectionLostError("the agent's name is not the connection's id")
            with ExitStack() as hold:
                if not hold.enter_context(self._table.copying(grant)):
                    agent.forget(name)
                    raise ConnectionLostError("the connection is over")
                try:
                    region = agent.register(
                        self._arena.buffer,
                        slot_spans(
                            self._arena,
                            grant.first_slot,
                            grant.slots,
                            grant.payload_capacity,
                            grant.result_capacity,
                        ),
                    )
                except ConnectionLostError:
                    agent.forget(name)
                    raise
                kept = hold.pop_all()
            peer = _Peer(grant, region, kept, SlotMemory.of(self._arena, region))
            self._peers[peer.name] = peer
        if self._poller is not None:
            self._poller.wake()
        return agent, peer

    def _map_results(self, agent: _ServerAgent, peer: _Peer, memory: pb.SlotMemory) -> None:
        with self._lock:
            if agent.learn(memory.description) != peer.name:
                raise ConnectionLostError("a description of another agent's memory")
            agent.connect(peer.name)
            peer.results = SlotMemory.read(memory)

    def leave(self, connection_id: str) -> None:
        """End the connection of a client that disconnects and writes no more: its slots are free at once.

        Nothing is written to the client after this.
        """
        with self._lock:
            peer = self._peers.get(connection_id)
            if peer is not None:
                self._end(peer, "the client left", clean=True)

    def supersede(self, client_id: str, incarnation: int) -> None:
        """End the former nixl connections of a client that connects again, before it gets new slots.

        The same process has closed its connection and writes no more. Writes of an earlier process may still
        arrive, so its slots stay reserved.
        """
        with self._lock:
            for peer in tuple(self._peers.values()):
                held_by = (peer.grant.client_id, peer.grant.client_incarnation)
                if held_by[0] == client_id and held_by[1] <= incarnation:
                    self._end(peer, "the client connected again")
            for entry in tuple(self._held):
                _, grant, hold = entry
                if (grant.client_id, grant.client_incarnation) == (client_id, incarnation):
                    hold.close()
                    self._held.remove(entry)

    def close(self) -> None:
        """End every client's connection and the polling thread, before the arena is closed. Idempotent."""
        with self._lock:
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()
        with self._lock:
            for peer in tuple(self._peers.values()):
                self._end(peer, "the server ends")
            for _, _, hold in self._held:
                hold.close()
            self._held.clear()
            if self._agent is not None:
                self._agent.close()
                self._agent = None

    def _end(self, peer: _Peer, reason: str, *, clean: bool = False) -> None:
        with self._lock:
            if self._peers.pop(peer.name, None) is None:
                return
            assert self._agent is not None  # It is closed after the last peer.
            self._table.revoke(peer.name)
            self._agent.forget(peer.name)
            self._agent.deregister(peer.region)
            if clean:
                peer.hold.close()
            else:
                self._held.append((time.monotonic() + GRACE_S, peer.grant, peer.hold))
                if self._poller is not None:  # It may have seen neither the peer nor this.
                    self._poller.wake()
            peer.reason = reason
            peer.ended.set()

    # -- polling --------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._peers or self._held)

    def _poll(self) -> bool:
        with self._lock:
            agent = self._agent
            if agent is None:
                return False
            ended = agent.written()
            for (peer, slot, length), why in ended:
                self._answered(agent, peer, slot, length, why)
            try:
                notes = agent.notes()
            except ConnectionLostError as error:
                _log.error("every connection ended: %s", error)
                for peer in tuple(self._peers.values()):
                    self._end(peer, str(error))
                return False
            for name, note in notes:
                if (sender := self._peers.get(name)) is not None:
                    self._take_note(agent, sender, note)
            begun = [self._answer(agent, peer) for peer in tuple(self._peers.values())]
            while self._held and self._held[0][0] < time.monotonic():
                self._held.pop(0)[2].close()
            return bool(ended or notes) or any(begun)

    def _pause(self, pause_us: int) -> bool:
        """For the poller: sleep until a request in computation is answered, but briefly; False: none is."""
        flags = self._arena.flags
        for peer in tuple(self._peers.values()):
            first, slots = peer.grant.first_slot, peer.grant.slots
            if flags.scan(first, slots, SlotState.WRITTEN.mask):
                done = SlotState.DONE.mask | SlotState.OFFLINE.mask
                # Without a pause, this thread would hold the interpreter against the loop's.
                least_us, most_us = _COMPUTING_US
                wait_us = min(max(pause_us, least_us), most_us)
                flags.wait(first, slots, done, peer.grant.reply_doorbell, -1, 0, wait_us)
                return True
        return False

    def _take_note(self, agent: _ServerAgent, peer: _Peer, note: bytes) -> None:
        try:
            if note == READY and peer.results is not None:
                peer.ready = True
                agent.note(peer.name, READY)
            else:
                self._admit(peer, note)
        except (ConnectionLostError, ValueError) as error:
            _log.warning("%s: connection ended: %s", peer.grant.client_id, error)
            self._end(peer, str(error))

    def _admit(self, peer: _Peer, note: bytes) -> None:
        """Pass a client's written request to the loop: set the slot's flag and ring the doorbell.

        Raises ValueError if the notification does not fit the request.
        """
        arena, grant = self._arena, peer.grant
        index, length = unpack_note(note)
        capacity = REQUEST_HEADER_BYTES + grant.payload_capacity
        if not peer.ready or index >= grant.slots or not REQUEST_HEADER_BYTES <= length <= capacity:
            raise ValueError(f"slot {index} of {grant.slots}, {length} bytes of {capacity}")
        slot = grant.first_slot + index
        # After a short write, the loop would compute with the end of an earlier payload.
        wanted = RequestHeader.unpack_from(arena.buffer, arena.request_offset(slot)).end
        if wanted != length:
            raise ValueError(f"{length} bytes where the header says {wanted}")
        if arena.client_write_done(slot):
            arena.flags.ring(DOORBELL)
        elif arena.flags.load(slot) != SlotState.OFFLINE:
            raise ValueError(f"slot {index} is not free")

    def _answer(self, agent: _ServerAgent, peer: _Peer) -> bool:
        """Begin to write a client's computed results into its memory; `_answered` then notifies it.

        Returns whether there were any.
        """
        arena, grant = self._arena, peer.grant
        if self._table.get(peer.name) is None:
            self._end(peer, "the connection is over")
            return False
        done = set(arena.flags.scan(grant.first_slot, grant.slots, SlotState.DONE.mask))
        for slot in (begun := done - peer.sending):
            index = slot - grant.first_slot
            length = ResultHeader.unpack_from(arena.buffer, arena.result_offset(slot)).end
            assert peer.results is not None  # `_admit` accepts requests of ready clients only.
            source, target = peer.slots.result(index), peer.results.result(index)
            try:
                agent.write(peer.name, source, target, length, (peer, slot, length))
            except ConnectionLostError as error:
                self._end(peer, str(error))
                break
            peer.sending.add(slot)
        return bool(begun)

    def _answered(self, agent: _ServerAgent, peer: _Peer, slot: int, length: int, why: str) -> None:
        peer.sending.discard(slot)
        try:
            if why:
                raise ConnectionLostError(why)
            # Free before notifying, because a notified client may write into this slot at once.
            if self._arena.client_free(slot):
                agent.note(peer.name, pack_note(slot - peer.grant.first_slot, length))
        except ConnectionLostError as error:
            self._end(peer, str(error))

"""Transport `shm`: the client maps the server's own arena (same machine, pid namespace and user)."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.process_watch import watch_process
from attention_client.connections.transports.granted import disconnect
from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import Arena
from eaas.wire.arena import machine_id
from eaas.wire.slot import DOORBELL

__all__ = ["SharedLink", "open_shared"]


class SharedLink:
    """The client's end of a shared-memory connection: the server's arena, mapped into this process."""

    transport = "shm"
    direct = True

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        self.arena = _attach(granted)
        self.payload_capacity = granted.payload_capacity
        self.result_capacity = granted.result_capacity
        self.first_slot = granted.first_slot
        self.slots = granted.slots
        self.reply_doorbell = granted.reply_doorbell
        self.generation = granted.generation
        self._connection_id = granted.connection_id
        self._service = expert_pb2_grpc.ExpertServiceStub(channel)
        # The kernel reports the end of a process long before any timeout.
        try:
            self._unwatch = watch_process(
                granted.arena_pid, lambda: on_lost(f"process {granted.arena_pid} ended")
            )
        except OSError as error:
            self.arena.close()
            if isinstance(error, ProcessLookupError):
                raise ConnectionLostError(f"process {granted.arena_pid} ended") from None
            raise SharedMemoryError(
                f"process {granted.arena_pid} cannot be watched: {error.strerror}"
            ) from error

    def notify(self, slot: int) -> None:
        """Ring the server's doorbell in the shared arena, so that it looks for requests (see `Link`)."""
        self.arena.flags.ring(DOORBELL)

    def close(self) -> None:
        """End the watch of the server's process and give the slots back (see `Link`)."""
        self._unwatch()
        disconnect(self._service, self._connection_id)


def _attach(granted: pb.ConnectResponse) -> Arena:
    """Map the arena that the server granted slots of, and no other: its random number proves it.

    Raises:
        ConnectionLostError: The process has no such arena here. It ended, or it is not of this machine or pid
            namespace.
        SharedMemoryError: The arena cannot be mapped, for example because it belongs to another user.
    """
    here = machine_id()
    # Another machine's pid would name an unrelated process.
    if granted.machine and here and granted.machine != here:
        raise ConnectionLostError("the server runs on another machine")
    arena = Arena.attach(granted.arena_pid, granted.arena_fd, granted.arena_bytes)
    if arena.incarnation != granted.server_incarnation:
        arena.close()
        raise ConnectionLostError(f"process {granted.arena_pid} is another process here")
    return arena


def open_shared(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> SharedLink:
    """Open a shm link, or say what the transport needs (see `Opener`)."""
    try:
        return SharedLink(granted, channel, on_lost)
    except (ConnectionLostError, SharedMemoryError) as error:
        raise type(error)(
            f"{error}; transport shm needs server and client on one host, in one container and "
            "as one user: run them so, or give the client --transport auto"
        ) from error

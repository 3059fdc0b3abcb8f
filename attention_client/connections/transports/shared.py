"""Transport `shm`: the client maps the server's own arena (same host, same user)."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.process_watch import watch_process
from attention_client.connections.transports.granted import disconnect
from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import Arena
from eaas.wire.slot import DOORBELL

__all__ = ["SharedLink"]


class SharedLink:
    """The client's end of a shared-memory connection: the server's arena, mapped into this process."""

    direct = True

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        try:
            self.arena = Arena.attach(granted.arena_pid, granted.arena_fd, granted.arena_bytes)
        except (ConnectionLostError, SharedMemoryError) as error:
            raise type(error)(
                f"{error}; transport shm needs server and client on one host, in one container and "
                "as one user: run them so, or give the client --transport grpc"
            ) from error
        if self.arena.incarnation != granted.server_incarnation:
            self.arena.close()
            raise ConnectionLostError(f"process {granted.arena_pid} is another process now")
        self.first_slot = granted.first_slot
        self.slots = granted.slots
        self.reply_bell = granted.reply_bell
        self.generation = granted.generation
        self._connection_id = granted.connection_id
        self._service = expert_pb2_grpc.ExpertServiceStub(channel)
        # The kernel reports the end of a process long before any timeout.
        try:
            self._unwatch = watch_process(
                granted.arena_pid, lambda: on_lost(f"process {granted.arena_pid} ended")
            )
        except ProcessLookupError:
            self.arena.close()
            raise ConnectionLostError(f"process {granted.arena_pid} ended") from None

    def kick(self, slot: int) -> None:
        """Ring the server's doorbell in the shared arena, so that it looks for requests (see `Link`)."""
        self.arena.flags.ring(DOORBELL)

    def close(self) -> None:
        """End the watch of the server's process and give the slots back (see `Link`)."""
        self._unwatch()
        disconnect(self._service, self._connection_id)

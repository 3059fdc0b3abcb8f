"""The expert server's end of the shm transport: clients map the arena itself."""

from __future__ import annotations

import os
from typing import Any

from eaas.wire.arena import machine_id
from expert_server.transports.endpoint import Endpoint

__all__ = ["SharedEndpoint"]


class SharedEndpoint(Endpoint):
    """Tells clients where the arena is; they and the loop do the rest."""

    def describe(self) -> dict[str, Any]:
        """Return the process and the descriptor of the arena, and the running kernel."""
        arena = self._arena
        return {
            "arena_pid": os.getpid(),
            "arena_fd": arena.fd,
            "arena_bytes": arena.size,
            "machine": machine_id(),
        }

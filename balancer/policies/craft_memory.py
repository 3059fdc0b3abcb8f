"""Memory cost of replicas in place of key-value cache (CRAFT, 3 and 5.3). For analysis; no policy uses it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReplicaMemory"]


@dataclass(frozen=True)
class ReplicaMemory:
    """Compares bytes of replicas with bytes of key-value cache, where one server holds both (as in CRAFT).

    Attributes:
        hidden: H.
        intermediate: I of an expert.
        weight_bytes: Bytes of one weight: 2 for bfloat16, 1 for FP8.
        cache_bytes: Bytes of key-value cache on a server without any replica.
    """

    hidden: int
    intermediate: int
    weight_bytes: float
    cache_bytes: float

    @property
    def expert_bytes(self) -> float:
        """Return the bytes of one expert of one layer: gate, up and down projection."""
        return 3 * self.hidden * self.intermediate * self.weight_bytes

    def replica_bytes(self, replicas: float) -> float:
        """Return the bytes of a server's replicas over all layers (R of CRAFT; L for EPLB's least)."""
        return replicas * self.expert_bytes

    def cache_share_lost(self, replicas: float) -> float:
        """Return the part of a server's key-value cache, 0 to 1, that its replicas over all layers take."""
        return min(1.0, self.replica_bytes(replicas) / self.cache_bytes)

    def most_replicas(self, share: float) -> int:
        """Return the most replicas on a server, over all layers, that take at most this part of its cache.

        For analysis; no policy calls it.
        """
        return int(share * self.cache_bytes // self.expert_bytes)

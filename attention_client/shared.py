"""What the layer calls of one client share: their view of the cluster, and what they have learned of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_client.budget import HedgeBudget
from attention_client.connection import Connection
from attention_client.dispatch import DispatchPolicy
from attention_client.metrics import ClientMetrics
from attention_client.speeds import Ejections, Speeds
from attention_client.tracing import RequestTraces
from attention_client.witness import Witness
from eaas.types import Placement
from eaas.wire.slot import WireDtype

__all__ = ["ClusterView", "Dispatcher", "Replicas"]


@dataclass(frozen=True, eq=False)
class ClusterView:
    """What a call needs to know; replaced as a whole when anything changes.

    Attributes:
        placement: Version, servers, shares.
        connections: One per server of the placement; None where there is none.
    """

    placement: Placement
    connections: tuple[Connection | None, ...]
    _rooms: dict[tuple[int, WireDtype], Sequence[int]] = field(default_factory=dict, repr=False)

    def usable_S(self) -> npt.NDArray[np.bool_]:
        """Servers with a live connection."""
        return np.array(self.usable(), dtype=np.bool_)

    def usable(self) -> list[bool]:
        """The same for a loop."""
        return [c is not None and c.lost_reason is None for c in self.connections]

    def max_tokens(self, top_k: int, dtype: WireDtype) -> Sequence[int]:
        """Tokens that a slot of each server takes; 1 where there is no connection."""
        known = self._rooms.get((top_k, dtype))
        if known is None:
            known = [c.max_tokens(top_k, dtype) if c is not None else 1 for c in self.connections]
            self._rooms[top_k, dtype] = known
        return known


class Replicas(Protocol):
    """Where views come from."""

    def view(self) -> ClusterView:
        """The newest view."""

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Sleep until there is another view than `seen`, or the time is over."""


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """What the calls of one client share; may be used by several threads.

    Attributes:
        replicas: Source of views.
        policy: Chooses among replicas.
        timeout_s: Deadline of a call over all attempts.
        attempt_timeout_s: Least time of one attempt.
        hedges: Budget of hedges.
        speeds: Of the servers.
        ejections: Of the servers.
        metrics: Counters.
        witness: Told who computed what.
        clock: Monotonic seconds.
        traces: Of requests; None: there are none.
    """

    replicas: Replicas
    policy: DispatchPolicy
    timeout_s: float
    attempt_timeout_s: float
    hedges: HedgeBudget
    metrics: ClientMetrics
    speeds: Speeds = field(default_factory=Speeds)
    ejections: Ejections = field(default_factory=Ejections)
    witness: Witness = field(default_factory=Witness)
    clock: Callable[[], float] = time.monotonic
    traces: RequestTraces | None = None

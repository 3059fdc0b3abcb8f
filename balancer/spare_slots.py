"""The balancer's thread that keeps the servers' spare slots filled, and tells clients what they hold.

After each reading of the load it chooses the replicas (`balancer.live.spares`), then changes them without
any acknowledgement by clients:

    1. Clients are sent the replicas that stay.
    2. Servers unload the others, and load the new ones. They begin no load after a step's time.
    3. Clients are sent what the servers hold now.

A client that uses a replica too late or too early gets STALE_PLACEMENT and asks another replica. Every call
to a server states all wanted replicas, so that the next round mends what a restart, a roll-out or a lost call
undid. Clients are sent all replicas after each change, and at least every 10 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from balancer.live.plans import PlannerSnapshot
from balancer.live.rebalancer import Rebalancer
from balancer.live.spares import STEPS, choose, scenarios
from balancer.planner.digests import Digests
from balancer.server_rounds import ServerRounds
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.spares import SpareReplicas, holdings, places

__all__ = ["SpareSlots"]

_log = get_logger(__name__)
# Time for clients to hear that a replica goes, before it goes.
_NOTICE_S = 0.05
# A call lasts for the time to load, and this. An expert that takes longer counts in the next round.
_CALL_S = 1.0
# Clients that have dropped a server's replicas after a late answer take them up again by then.
_REPEAT_S = 10.0
# Refusals that the same request would get again in this placement, with what to do.
_LASTING = {
    grpc.StatusCode.UNIMPLEMENTED: "it is of an older release: update it",
    grpc.StatusCode.DATA_LOSS: "its copy of the checkpoint is damaged",
}


class SpareSlots(ServerRounds):
    """Fills the servers' spare slots after each reading of the load (`begin`), until `close`.

    A failure leaves the slots as they are.

    Args:
        rebalancer: Has the load and the planner's state.
        step_s: Seconds between two readings, which is also the time for loads in a round.
        publish: Called with the replicas that clients may use, and the number that servers have loaded.
        on_broken, tls: See `ServerRounds`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        step_s: float,
        publish: Callable[[SpareReplicas, int], None],
        on_broken: Callable[[Exception], None],
        tls: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rebalancer = rebalancer
        self._step_s = step_s
        self._on_publish = publish
        self._clock = clock
        # What clients were sent last, and when.
        self._spares = SpareReplicas()
        self._sent_at = clock()
        # Processes that hold no spare replicas in this placement (`Member.process`).
        self._unfit: set[tuple[str, int, str, int, str]] = set()
        super().__init__("spares", on_broken, tls)

    def _round(self) -> None:
        try:
            now = self._rebalancer.snapshot()
        except TimeoutError:
            return  # The planner is closing or busy.
        wanted = self._choose(now)
        if wanted is None:
            return
        remaining = self._spares.intersection(wanted)
        if remaining != self._spares:
            self._publish(remaining, 0)
            self._closed.wait(_NOTICE_S)
        held, loaded = self._order(wanted, now)
        is_late = bool(held.held) and self._clock() >= self._sent_at + _REPEAT_S
        if held != self._spares or loaded or is_late:
            self._publish(held, loaded)

    def _choose(self, now: PlannerSnapshot) -> SpareReplicas | None:
        """Return the replicas that servers should hold; None: leave all as it is."""
        placement, load = now.placement, self._rebalancer.load
        if placement is None or not now.at_rest:
            return None
        if placement.epoch != self._spares.epoch:
            # The roll-out unloaded them all.
            self._unfit.clear()
            self._publish(SpareReplicas(placement.epoch), 0)
        tokens_WLE = load.tokens_WLE(STEPS)
        if tokens_WLE is None or {*now.away}.issuperset(placement.servers):
            return None
        situation = now.situation(load)
        if not situation.holds_LSE.any(axis=1).all():
            return None  # The planner is about to load what is lost.
        load_BLE = scenarios(tokens_WLE, len(situation.servers))
        if not len(load_BLE):
            return None
        able = {
            s for s in now.able if s in now.servers and now.servers[s].process not in self._unfit
        }
        return choose(situation, load_BLE, self._spares, able)

    def _publish(self, spares: SpareReplicas, loaded: int) -> None:
        if not self._closed.is_set():
            self._spares, self._sent_at = spares, self._clock()
            self._on_publish(spares, loaded)

    def _order(self, wanted: SpareReplicas, now: PlannerSnapshot) -> tuple[SpareReplicas, int]:
        """Have servers hold the wanted replicas; return those that they hold, and how many they loaded."""
        assert now.placement is not None
        layers = now.placement.shape[0]
        servers = {
            s: m for s, m in now.servers.items() if s in now.able and m.process not in self._unfit
        }

        def send(stub: Any, server_id: str) -> Any:
            request = _request(wanted, server_id, layers, now.digests_LE)
            request.load_s = self._step_s
            return stub.HoldSpares.future(request, timeout=self._step_s + _CALL_S)

        answers, errors = self._call_all(servers, send)
        for server_id, code in errors.items():
            if code in _LASTING:
                self._unfit.add(servers[server_id].process)
                _log.warning("%s holds no spare replicas: %s", server_id, _LASTING[code])
        held = {s: places(answer.layers) & wanted.of(s) for s, answer in answers.items()}
        loaded = sum(answer.loaded for answer in answers.values())
        return SpareReplicas(wanted.epoch, held), loaded


def _request(
    wanted: SpareReplicas, server_id: str, num_layers: int, digests_LE: Digests | None
) -> pb.HoldSparesRequest:
    layers = holdings(wanted.of(server_id), num_layers)
    if digests_LE is not None:
        for layer, holding in enumerate(layers):
            holding.digests.extend(digests_LE[layer, list(holding.experts)].tolist())
    return pb.HoldSparesRequest(epoch=wanted.epoch, layers=layers)

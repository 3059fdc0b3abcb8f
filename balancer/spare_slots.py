"""The balancer's thread that keeps the servers' spare slots filled, and tells clients what they hold.

After each reading of the load it chooses the replicas (`balancer.live.spares`), then changes them without
any acknowledgement by clients:

    1. Clients are sent the replicas that stay.
    2. Servers unload the others, and load the new ones for a step's time at most.
    3. Clients are sent what the servers hold now.

A client that uses a replica too late or too early gets STALE_PLACEMENT and asks another replica. Every call
states all wanted replicas, so that the next round mends what a restart, a roll-out or a lost call undid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from balancer.channel_pool import ServerChannels
from balancer.live.away import among_the_living
from balancer.live.plans import PlannerSnapshot
from balancer.live.rebalancer import Rebalancer
from balancer.live.spares import STEPS, choose, scenarios
from balancer.planner.digests import Digests
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.spares import SpareReplicas, holdings, places

__all__ = ["SpareSlots"]

_log = get_logger(__name__)
_JOIN_S = 3.0
# Time for clients to hear that a replica goes, before it goes.
_NOTICE_S = 0.05
# A call may take longer than the time to load by one expert.
_LAST_LOAD_S = 10.0


class SpareSlots:
    """Fills the servers' spare slots from a daemon thread until `close`.

    Args:
        rebalancer: Has the load and the planner's state.
        step_s: Seconds between two readings, which is also the time for loads in a round.
        publish: Called with the replicas that clients may use, and the number that servers have loaded.
        on_broken: Called with an unexpected error; the slots then stay as they are.
        tls: This process's identity; None: plain text.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        step_s: float,
        publish: Callable[[SpareReplicas, int], None],
        on_broken: Callable[[Exception], None],
        tls: Identity | None = None,
    ) -> None:
        self._rebalancer = rebalancer
        self._step_s = step_s
        self._publish = publish
        self._on_broken = on_broken
        self._channels = ServerChannels(tls)
        self._spares = SpareReplicas()
        # Servers whose copy of the checkpoint is damaged, by the epoch that showed it.
        self._damaged: set[tuple[int, str]] = set()
        self._closed = False
        self._has_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spares", daemon=True)
        self._thread.start()

    def has_read(self) -> None:
        """Begin a round, after a reading of the load; does nothing while one is running."""
        self._has_read.set()

    def close(self) -> None:
        """Stop the thread. The servers keep their replicas until the next roll-out. Idempotent."""
        self._closed = True
        self._has_read.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._has_read.wait()
                self._has_read.clear()
                if not self._closed:
                    self._fill()
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            if not self._closed:
                _log.exception("spare slots are not filled any more")
                self._on_broken(error)
        finally:
            self._channels.close()

    def _fill(self) -> None:
        try:
            now = self._rebalancer.snapshot()
        except TimeoutError:
            return  # The planner is closing or busy.
        wanted = self._choose(now)
        if wanted is None:
            return
        kept = self._spares.both(wanted)
        if kept != self._spares:
            self._set(kept, 0)
            time.sleep(_NOTICE_S)
        held, loaded = self._hold(wanted, now)
        if held != self._spares or loaded:
            self._set(held, loaded)

    def _choose(self, now: PlannerSnapshot) -> SpareReplicas | None:
        """Return the replicas that servers should hold; None: leave all as it is."""
        placement, load = now.placement, self._rebalancer.load
        if placement is None or load is None or not now.at_rest:
            return None
        if placement.epoch != self._spares.epoch:
            # The roll-out unloaded them all.
            self._spares = SpareReplicas(placement.epoch)
        tokens_WLE = load.last_WLE(STEPS)
        if tokens_WLE is None or {*now.away}.issuperset(placement.servers):
            return None
        situation = among_the_living(load, placement, now.away)
        if not situation.holds_LSE.any(axis=1).all():
            return None  # The planner is about to load what is lost.
        load_BLE = scenarios(tokens_WLE, len(situation.servers))
        if not len(load_BLE):
            return None
        damaged = {server for epoch, server in self._damaged if epoch == placement.epoch}
        return choose(situation, load_BLE, self._spares, now.able - damaged)

    def _set(self, spares: SpareReplicas, loaded: int) -> None:
        self._spares = spares
        self._publish(spares, loaded)

    def _hold(self, wanted: SpareReplicas, now: PlannerSnapshot) -> tuple[SpareReplicas, int]:
        """Have servers hold the wanted replicas; return those that they hold, and how many they loaded."""
        assert now.placement is not None
        servers = {s: m for s, m in now.servers.items() if s in now.able}
        self._channels.keep({m.address for m in servers.values()})
        calls = {}
        for server_id, member in servers.items():
            request = _request(wanted, server_id, now.placement.holds_LSE.shape[0], now.digests_LE)
            request.load_s = self._step_s
            pooled = self._channels.acquire(member.address)
            stub = expert_pb2_grpc.ExpertServiceStub(pooled.channel)
            timeout = self._step_s + _LAST_LOAD_S
            calls[server_id] = pooled, stub.HoldSpares.future(request, timeout=timeout)
        held: dict[str, frozenset[tuple[int, int]]] = {}
        loaded = 0
        for server_id, (pooled, call) in calls.items():
            try:
                response = call.result()
                held[server_id] = places(response.layers) & wanted.of(server_id)
                loaded += response.loaded
            except grpc.RpcError as error:
                _log.debug("%s holds no spare replicas: %s", server_id, error)
                if call.code() is grpc.StatusCode.DATA_LOSS:
                    self._damaged.add((wanted.epoch, server_id))
            self._channels.release(pooled, works=server_id in held)
        return SpareReplicas(wanted.epoch, held), loaded


def _request(
    wanted: SpareReplicas, server_id: str, num_layers: int, digests_LE: Digests | None
) -> pb.HoldSparesRequest:
    layers = holdings(wanted.of(server_id), num_layers)
    if digests_LE is not None:
        for layer, holding in enumerate(layers):
            holding.digests.extend(digests_LE[layer, list(holding.experts)].tolist())
    return pb.HoldSparesRequest(epoch=wanted.epoch, layers=layers)

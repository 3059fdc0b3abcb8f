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

import threading
import time
from collections.abc import Callable

import grpc

from balancer.channel_pool import ServerChannels
from balancer.live.plans import PlannerSnapshot
from balancer.live.rebalancer import Rebalancer
from balancer.live.spares import STEPS, choose, scenarios
from balancer.planner.digests import Digests
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.spares import SpareReplicas, holdings, places
from eaas.types import Member

__all__ = ["SpareSlots"]

_log = get_logger(__name__)
_JOIN_S = 3.0
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
_ANSWERS = (
    *_LASTING,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class SpareSlots:
    """Fills the servers' spare slots from a daemon thread until `close`.

    Args:
        rebalancer: Has the load and the planner's state.
        step_s: Seconds between two readings, which is also the time for loads in a round.
        publish: Called with the replicas that clients may use, and the number that servers have loaded.
        on_broken: Called with an unexpected error; the slots then stay as they are.
        tls: This process's identity; None: plain text.
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
        self._on_broken = on_broken
        self._clock = clock
        self._channels = ServerChannels(tls)
        # What clients were told last, and when.
        self._spares = SpareReplicas()
        self._told_at = clock()
        # Processes that hold no spare replicas in this placement (`Member.process`).
        self._unfit: set[tuple[str, int, str, int, str]] = set()
        self._calls: list[grpc.Future] = []
        self._closed = threading.Event()
        self._has_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spares", daemon=True)
        self._thread.start()

    def has_read(self) -> None:
        """Ask for a round, after a reading of the load. One that is running ends first."""
        self._has_read.set()

    def close(self) -> None:
        """Stop the thread. The servers keep their replicas until the next roll-out. Idempotent."""
        self._closed.set()
        self._has_read.set()
        for call in tuple(self._calls):
            call.cancel()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._has_read.wait()
                self._has_read.clear()
                if not self._closed.is_set():
                    self._fill()
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            if not self._closed.is_set():
                _log.exception("spare slots are not filled any more")
                self._on_broken(error)
        finally:
            self._channels.close()

    def _fill(self) -> None:
        """Do a round."""
        try:
            now = self._rebalancer.snapshot()
        except TimeoutError:
            return  # The planner is closing or busy.
        wanted = self._choose(now)
        if wanted is None:
            return
        kept = self._spares.intersection(wanted)
        if kept != self._spares:
            self._publish(kept, 0)
            self._closed.wait(_NOTICE_S)
        held, loaded = self._order(wanted, now)
        is_late = bool(held.held) and self._clock() >= self._told_at + _REPEAT_S
        if held != self._spares or loaded or is_late:
            self._publish(held, loaded)

    def _choose(self, now: PlannerSnapshot) -> SpareReplicas | None:
        """Return the replicas that servers should hold; None: leave all as it is."""
        placement, load = now.placement, self._rebalancer.load
        if placement is None or load is None or not now.at_rest:
            return None
        if placement.epoch != self._spares.epoch:
            # The roll-out unloaded them all.
            self._unfit.clear()
            self._publish(SpareReplicas(placement.epoch), 0)
        tokens_WLE = load.last_WLE(STEPS)
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
            self._spares, self._told_at = spares, self._clock()
            self._on_publish(spares, loaded)

    def _order(self, wanted: SpareReplicas, now: PlannerSnapshot) -> tuple[SpareReplicas, int]:
        """Have servers hold the wanted replicas; return those that they hold, and how many they loaded."""
        assert now.placement is not None
        layers = now.placement.shape[0]
        servers = {
            s: m for s, m in now.servers.items() if s in now.able and m.process not in self._unfit
        }
        self._channels.keep({m.address for m in servers.values()})
        calls = {}
        for server_id, member in servers.items():
            request = _request(wanted, server_id, layers, now.digests_LE)
            request.load_s = self._step_s
            pooled = self._channels.acquire(member.address)
            stub = expert_pb2_grpc.ExpertServiceStub(pooled.channel)
            calls[server_id] = (
                pooled,
                stub.HoldSpares.future(request, timeout=self._step_s + _CALL_S),
            )
        self._calls = [call for _, call in calls.values()]
        held: dict[str, frozenset[tuple[int, int]]] = {}
        loaded = 0
        for server_id, (pooled, call) in calls.items():
            works = True
            try:
                response = call.result()
                held[server_id] = places(response.layers) & wanted.of(server_id)
                loaded += response.loaded
            except grpc.FutureCancelledError:
                works = False  # `close` was called.
            except grpc.RpcError as error:
                works = call.code() in _ANSWERS
                self._refused(servers[server_id], call.code(), error)
            self._channels.release(pooled, works=works)
        self._calls = []
        return SpareReplicas(wanted.epoch, held), loaded

    def _refused(self, server: Member, code: grpc.StatusCode, error: grpc.RpcError) -> None:
        if code in _LASTING:
            self._unfit.add(server.process)
            _log.warning("%s holds no spare replicas: %s", server.id, _LASTING[code])
        else:
            _log.debug("%s: %s", server.id, error)


def _request(
    wanted: SpareReplicas, server_id: str, num_layers: int, digests_LE: Digests | None
) -> pb.HoldSparesRequest:
    layers = holdings(wanted.of(server_id), num_layers)
    if digests_LE is not None:
        for layer, holding in enumerate(layers):
            holding.digests.extend(digests_LE[layer, list(holding.experts)].tolist())
    return pb.HoldSparesRequest(epoch=wanted.epoch, layers=layers)

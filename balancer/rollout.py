"""The balancer's planner thread: carries out the planner's actions (calls to expert servers, publications).

One thread owns the planner; calls to servers report their outcomes to it.
"""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from balancer.channel_pool import PooledChannel, ServerChannels
from balancer.planner.actions import (
    Action,
    Call,
    Complain,
    Complete,
    Inspect,
    Prepare,
    Publish,
    Retire,
)
from balancer.planner.digests import Digests
from balancer.planner.planner import Planner
from eaas.control_plane.expert_calls import MISMATCH_KEY
from eaas.log import get_logger
from eaas.membership.cluster_view import MembershipView
from eaas.net.message_ranges import TRUSTED_EPOCH
from eaas.net.message_validation import check
from eaas.net.tls import Identity
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import Placement

__all__ = ["Rollout"]

_log = get_logger(__name__)

_RETRY_S = 0.5
# Pause between servers' loads when no client waits for a placement, and the most of these pauses in sum.
_REST_S = 0.25
_RESTS_S = 2.0
_JOIN_S = 3.0
# Deadline of calls that load no experts.
_SHORT_S = 10.0


@dataclass(frozen=True)
class _Outcome:
    call: Call
    rpc: Any
    pooled: PooledChannel


@dataclass(frozen=True)
class _Question:
    ask: Callable[[Planner], Any]
    answer: concurrent.futures.Future[Any]


class Rollout:
    """Has servers load the planner's placements, publishes each once loaded, then has them drop the rest.

    Args:
        planner: Decides the actions; used only by this object's thread.
        publish: Called with each placement that clients should use.
        load_timeout_s: Deadline of one PreparePlacement.
        on_broken: Called with an unexpected error; the roll-out thread then stops.
        on_phase: Called when servers begin to load a placement ("prepare"), when it is published ("retire"),
            and when servers hold nothing else ("complete"). Must not block.
        tls: This process's identity; None: plain text.
    """

    def __init__(
        self,
        planner: Planner,
        publish: Callable[[Placement], None],
        load_timeout_s: float,
        on_broken: Callable[[Exception], None],
        on_phase: Callable[[str, Placement], None] = lambda _phase, _placement: None,
        tls: Identity | None = None,
    ) -> None:
        self._channels = ServerChannels(tls)
        self._on_broken = on_broken
        self._on_phase = on_phase
        self._preparing = 0
        self._planner = planner
        self._publish = publish
        self._load_timeout_s = load_timeout_s
        self._inbox: queue.SimpleQueue[MembershipView | _Outcome | _Question | None]
        self._inbox = queue.SimpleQueue()
        self._running: set[Any] = set()
        # Heap of delayed calls: start time, number of the call (for ties), call.
        self._later: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()
        # Earliest start of the next call that waits its turn.
        self._next_at = 0.0
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def observe(self, view: MembershipView) -> None:
        """Pass a new cluster view from the monitor to the planner's thread. Does not block."""
        self._inbox.put(view)

    def ask(self, question: Callable[[Planner], Any]) -> Any:
        """Run a function of the planner on its thread and return the result; for all other threads.

        Raises:
            TimeoutError: The planner's thread does not answer, because it is busy or closing.
            Exception: Any error that the function raises.
        """
        item = _Question(question, concurrent.futures.Future())
        self._inbox.put(item)
        return item.answer.result(_JOIN_S)

    def close(self) -> None:
        """Stop the planner's thread and cancel its calls; servers keep what they hold. Idempotent."""
        self._inbox.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            _log.exception("rolling out placements failed")
            self._on_broken(error)
        finally:
            for rpc in self._running:
                rpc.cancel()
            self._channels.close()

    def _work(self) -> None:
        while True:
            now = time.monotonic()
            self._start_due(now)
            self._act(self._planner.tick(now))
            for item in self._arrived(now):
                if item is None:
                    return
                self._take(item)

    def _arrived(self, now: float) -> Iterator[MembershipView | _Outcome | _Question | None]:
        """Wait for something to arrive or to become due; yield all that is there. One tick serves it all."""
        try:
            yield self._inbox.get(timeout=self._idle_s(now))
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, item: MembershipView | _Outcome | _Question) -> None:
        if isinstance(item, MembershipView):
            members = item.members.values()
            self._channels.keep({m.address for m in members if not m.state.is_gone})
            self._act(self._planner.observe(item.members, time.monotonic()))
        elif isinstance(item, _Question):
            _answer(item, self._planner)
        else:
            self._finish(item)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Publish(placement):
                    _log.info("placement %d: published", placement.epoch)
                    self._publish(placement)
                    self._on_phase("retire", placement)
                case Complete(placement):
                    self._on_phase("complete", placement)
                case Complain(reason, refused):
                    _log.error("%s", f"{refused} gets no experts: {reason}" if refused else reason)
                case _:
                    if isinstance(action, Prepare) and action.placement.epoch > self._preparing:
                        self._preparing = action.placement.epoch
                        self._on_phase("prepare", action.placement)
                    self._schedule(action)

    def _schedule(self, call: Call) -> None:
        """Start a call now, or spaced from others if no client waits, because loading slows batches."""
        if isinstance(call, Inspect) or not self._planner.has_time(call):
            self._start(call)
            return
        at = max(time.monotonic(), self._next_at)
        self._next_at = at + min(_REST_S, _RESTS_S / max(1, len(call.placement.servers)))
        self._delay(call, at)

    def _delay(self, call: Call, until: float) -> None:
        heapq.heappush(self._later, (until, next(self._numbers), call))

    def _start(self, call: Call) -> None:
        pooled = self._channels.acquire(call.address)
        rpc = self._send(call, expert_pb2_grpc.ExpertServiceStub(pooled.channel))
        self._running.add(rpc)
        rpc.add_done_callback(lambda done: self._inbox.put(_Outcome(call, rpc, pooled)))

    def _send(self, call: Call, stub: Any) -> Any:
        match call:
            case Inspect():
                return stub.ListExperts.future(expert_pb2.ListExpertsRequest(), timeout=_SHORT_S)
            case Prepare(placement=placement):
                epoch, layers = placement.epoch, placement.holdings_of(call.server_id)
                for layer, holding in enumerate(layers):
                    holding.digests[:] = _known_digests(call, layer, holding.experts)
                replicas = sum(len(layer.experts) for layer in layers)
                _log.info(
                    "placement %d: %s should hold %d replicas", epoch, call.server_id, replicas
                )
                return stub.PreparePlacement.future(
                    expert_pb2.PreparePlacementRequest(
                        epoch=epoch, layers=layers, layer_order=call.layer_order
                    ),
                    timeout=self._load_timeout_s,
                )
            case Retire(placement=placement):
                return stub.RetirePlacement.future(
                    expert_pb2.RetirePlacementRequest(
                        epoch=placement.epoch, layers=placement.holdings_of(call.server_id)
                    ),
                    timeout=_SHORT_S,
                )

    def _finish(self, outcome: _Outcome) -> None:
        call, rpc, now = outcome.call, outcome.rpc, time.monotonic()
        self._running.remove(rpc)
        code = rpc.code()
        self._channels.release(outcome.pooled, works=code is grpc.StatusCode.OK)
        why = f"{code.name}: {rpc.details()}"
        if code is grpc.StatusCode.OK:
            try:
                self._succeeded(call, rpc.result())
            except ValueError as error:
                why = str(error)
            else:
                return
        elif any(key == MISMATCH_KEY for key, _ in rpc.trailing_metadata() or ()):
            self._act(self._planner.mismatched(call, now, rpc.details()))
            return
        _log.warning("%s: %s failed: %s", call.server_id, type(call).__name__.lower(), why)
        self._delay(call, now + _RETRY_S)
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED and isinstance(call, Prepare)
        self._act(self._planner.failed(call, now, timed_out=timed_out))

    def _succeeded(self, call: Call, response: Any) -> None:
        """Note a server's answer for the planner's next tick. Raises ValueError for an impossible one."""
        check(response)
        match call:
            case Inspect():
                if response.epoch > TRUSTED_EPOCH:
                    raise ValueError(f"it claims epoch {response.epoch}, which no balancer reaches")
                held = _read(response.layers, (call.num_layers, call.num_experts))
                self._planner.succeeded(call, held[0], response.epoch, held[1])
                return
            case Prepare():
                layers, _, experts = call.placement.holds_LSE.shape
                if response.awaits_digests:
                    _, digests_LE = _read(response.layers, (layers, experts))
                    self._planner.loaded(call, digests_LE)
                    return
                if not response.layers:
                    _log.warning(
                        "%s runs an older release: its experts are not compared with other servers'",
                        call.server_id,
                    )
        self._planner.succeeded(call)

    def _idle_s(self, now: float) -> float | None:
        """Return the seconds until a delayed call or the planner is due without an event; None: never."""
        times = [at for at, _, _ in self._later[:1]]
        wake_at = self._planner.wake_at(now)
        if wake_at is not None:
            times.append(wake_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _start_due(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, _, call = heapq.heappop(self._later)
            if self._planner.is_wanted(call):
                self._start(call)


def _answer(question: _Question, planner: Planner) -> None:
    """Run a question's function on the planner; pass its result or error to the thread that asked."""
    try:
        question.answer.set_result(question.ask(planner))
    except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
        question.answer.set_exception(error)


def _known_digests(call: Prepare, layer: int, experts: Sequence[int]) -> list[int]:
    if call.digests_LE is None:
        return [0] * len(experts)
    return [int(digest) for digest in call.digests_LE[layer, list(experts)]]


def _read(
    layers: Sequence[common_pb2.Holding], shape: tuple[int, int]
) -> tuple[npt.NDArray[np.bool_], Digests]:
    """Convert a server's answer to holds and digests, (L, E) each. Raises ValueError if the model differs."""
    if len(layers) != shape[0]:
        raise ValueError(f"it has {len(layers)} layers, the model has {shape[0]}")
    holds_LE, digests_LE = np.zeros(shape, np.bool_), np.zeros(shape, np.uint64)
    for layer, holding in enumerate(layers):
        if any(expert >= shape[1] for expert in holding.experts):
            raise ValueError(f"it holds an expert beyond {shape[1] - 1} in layer {layer}")
        if len(holding.digests) not in (0, len(holding.experts)):
            raise ValueError(f"not a digest for each expert of layer {layer}")
        holds_LE[layer, holding.experts] = True
        digests_LE[layer, holding.experts[: len(holding.digests)]] = holding.digests
    return holds_LE, digests_LE

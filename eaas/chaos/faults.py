"""Carries faults out. Each is a generator: it strikes, mends, and yields how long it has nothing to do.

So one thread, which every process was started from and which hears Ctrl-C, carries out any number at a time.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np

from eaas.balancer_calls import drain_server
from eaas.balancer_client import BalancerClient
from eaas.chaos.cluster import DAMAGED, ChaosCluster
from eaas.chaos.network import Namespace
from eaas.chaos.schedule import Fault
from eaas.chaos.strangers import hostile_name, is_refused
from eaas.cli.client import fetch_status
from eaas.errors import ClusterError, EaasError
from eaas.local.process import ChildProcess
from eaas.types import Placement

__all__ = ["Faults", "Steps"]

Steps = Iterator[float]
"""Seconds until the next step."""

_LOOK_S = 0.05
_READY_S = 30.0
_SCALE_S = 60.0
# The balancer may be away when a server joins.
_REFUSED_S = 60.0
# A tenth of the processor.
_STOPPED_S, _RUNNING_S = 0.045, 0.005
# Less than any arena.
_SMALL_BYTES = 4096


class Faults:
    """Strikes a cluster.

    Args:
        cluster: Whom.
        namespace: The first server's network; None: there are no partitions.
    """

    def __init__(self, cluster: ChaosCluster, namespace: Namespace | None) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._kinds: dict[str, Callable[[Fault, list[str]], Steps]] = {
            "kill": self._kill,
            "pair": self._kill,
            "hang": self._hang,
            "slow": self._slow,
            "partition": self._partition,
            "memory": self._memory,
            "monitor": self._kill,
            "pause": self._hang,
            "balancer": self._kill,
            "rebalance": self._rebalance,
            "scale": self._scale,
            "damaged": self._damaged,
            "unreachable": self._unreachable,
            "names": self._names,
        }

    def targets(self, fault: Fault) -> list[str]:
        """Names of the processes that a fault meets."""
        fixed = {
            "monitor": "monitor",
            "pause": "monitor",
            "balancer": "balancer",
            "damaged": DAMAGED,
        }
        if fault.kind in fixed:
            return [fixed[fault.kind]]
        return [self._cluster.server_name(number) for number in fault.servers]

    def strike(self, fault: Fault) -> Steps:
        """Strike, and mend. Raises EaasError where it cannot be mended."""
        return self._kinds[fault.kind](fault, self.targets(fault))

    def calm(self) -> None:
        """Let go on whatever is stopped or cut off: for an end in the middle of a fault."""
        for child in self._cluster.children.values():
            child.signal(signal.SIGCONT)

    def _child(self, name: str) -> ChildProcess:
        return self._cluster.children[name]

    def _kill(self, fault: Fault, names: list[str]) -> Steps:
        for name in names:
            self._child(name).signal(signal.SIGKILL)
        yield fault.lasts_s
        for name in names:
            yield from self._again(name)

    def _again(self, name: str) -> Steps:
        yield from self._ready(self._cluster.start_again(name))

    def _ready(self, child: ChildProcess, within_s: float = _READY_S) -> Steps:
        deadline = time.monotonic() + within_s
        while True:
            child.read()
            if child.address is not None:
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"{child.name} was not ready after {within_s:.0f} s")
            yield _LOOK_S

    def _hang(self, fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        self._child(name).signal(signal.SIGSTOP)
        yield fault.lasts_s
        self._child(name).signal(signal.SIGCONT)

    def _slow(self, fault: Fault, names: list[str]) -> Steps:
        child = self._child(names[0])
        until = time.monotonic() + fault.lasts_s
        while time.monotonic() < until:
            child.signal(signal.SIGSTOP)
            yield _STOPPED_S
            child.signal(signal.SIGCONT)
            yield _RUNNING_S

    def _partition(self, fault: Fault, _names: list[str]) -> Steps:
        assert self._namespace is not None
        for cable in ("monitor", "data"):
            self._namespace.cut(cable)
        yield fault.lasts_s
        for cable in ("monitor", "data"):
            self._namespace.mend(cable)

    def _memory(self, fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        self._child(name).signal(signal.SIGKILL)
        yield fault.lasts_s
        self._cluster.shared_memory[name] = _SMALL_BYTES
        try:
            yield from self._again(name)
        except EaasError as error:
            if "/dev/shm: asked for" not in str(error):
                raise
        else:
            raise ClusterError(f"{name} started where shared memory is full")
        yield from self._again(name)

    def _rebalance(self, fault: Fault, _names: list[str]) -> Steps:
        address = self._child("balancer").address
        assert address is not None
        dice = np.random.default_rng(fault.dice)
        deadline = time.monotonic() + _READY_S
        with BalancerClient(address) as balancer:
            while True:
                try:
                    now = balancer.placement()
                    if now is not None:
                        balancer.apply_placement(
                            _any_placement(now, self._cluster.redundancy, dice)
                        )
                        return
                except ClusterError as error:
                    # A roll-out is going on, or a server of it has just died.
                    if time.monotonic() > deadline:
                        raise ClusterError(f"never had its turn: {error}") from error
                yield 4 * _LOOK_S

    def _scale(self, fault: Fault, _names: list[str]) -> Steps:
        cluster = self._cluster
        child = cluster.add_numbered(cluster.servers)
        yield from self._ready(child)
        yield fault.lasts_s
        deadline = time.monotonic() + _SCALE_S
        asked = False
        while child.running:
            try:
                if not asked:
                    drain_server(str(self._child("balancer").address), child.name)
                    asked = True
            except ClusterError:
                # The balancer is away, or does not know yet who is back.
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise ClusterError(f"{child.name} did not leave within {_SCALE_S:.0f} s")
            yield 4 * _LOOK_S
        cluster.forget(child.name)

    def _damaged(self, _fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        child = self._cluster.add_damaged()
        try:
            yield from self._ready(child, _REFUSED_S)
        except EaasError as error:
            if ".safetensors: tensor " not in str(error):
                raise
        else:
            raise ClusterError(f"{name} serves")
        self._cluster.forget(name)

    def _unreachable(self, fault: Fault, _names: list[str]) -> Steps:
        child = self._cluster.add_unreachable()
        try:
            yield from self._told(child, fault.lasts_s)
        finally:
            child.signal(signal.SIGKILL)
            self._cluster.forget(child.name)

    def _told(self, child: ChildProcess, lasts_s: float) -> Steps:
        """Until the client says that it cannot reach a server, and then for so long: it gets no experts."""
        deadline, until = time.monotonic() + _READY_S, math.inf
        while time.monotonic() < until:
            try:
                members = fetch_status(self._cluster.endpoint)["members"]
            except ClusterError:
                members = []
            for member in (m for m in members if m["id"] == child.name):
                if member["experts"]:
                    raise ClusterError(f"{child.name} got experts, and no client reaches it")
                if member["unreachable"] and math.isinf(until):
                    until = time.monotonic() + lasts_s
            if math.isinf(until) and time.monotonic() > deadline:
                raise ClusterError(f"nobody says that {child.name} cannot be reached")
            yield 4 * _LOOK_S

    def _names(self, fault: Fault, _names: list[str]) -> Steps:
        dice = random.Random(fault.dice)
        now = time.monotonic()
        until, deadline = now + fault.lasts_s, now + _READY_S
        refused = 0
        # The monitor may be away for some time.
        while time.monotonic() < until or not refused:
            refused += is_refused(self._cluster.monitor_address, hostile_name(dice))
            if not refused and time.monotonic() > deadline:
                raise ClusterError("the monitor answers no stranger")
            yield _LOOK_S


def _any_placement(now: Placement, redundancy: int, dice: np.random.Generator) -> Placement:
    """Each expert on as many servers as it is to be, whichever, with any shares."""
    holds_LSE = dice.random(now.holds_LSE.shape).argsort(axis=1).argsort(axis=1) < redundancy
    shares_LSE = np.where(holds_LSE, 0.1 + dice.random(holds_LSE.shape), 0)
    shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
    return Placement(0, now.servers, holds_LSE, shares_LSE.astype(np.float32))

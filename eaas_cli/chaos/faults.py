"""Faults as generators: each strikes, mends, and yields the pauses between its steps.

One thread therefore runs any number of faults at a time: the one that starts the processes and gets Ctrl-C.
"""

from __future__ import annotations

import math
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.shard import TensorSlice
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError, EaasError
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import common_pb2, monitor_pb2, monitor_pb2_grpc
from eaas.types import Placement, Role
from eaas_cli.chaos.cluster import DAMAGED, ChaosCluster
from eaas_cli.chaos.network import Namespace
from eaas_cli.chaos.schedule import CLIENTS, Fault
from eaas_cli.endpoint import fetch_status
from eaas_cli.local.interface import CLIENT, SERVER
from eaas_cli.local.process import ChildProcess

__all__ = ["Faults", "Steps", "damaged_copy", "flip", "hostile_name", "is_refused"]

Steps = Iterator[float]
"""Steps of a fault: each yielded value is the pause in seconds before the next step."""

_POLL_S = 0.05
_READY_S = 30.0
_SCALE_S = 60.0
# The balancer may be down when a server joins.
_REFUSED_S = 60.0
# A slow server is stopped and resumed in turn for these seconds, which leaves it a tenth of the processor.
_STOPPED_S, _RUNNING_S = 0.045, 0.005
# Bytes of /dev/shm: fewer than any arena needs.
_SMALL_BYTES = 4096
# Parts of hostile names: markup, scripts, paths, options, format strings and control sequences.
_PIECES = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", ":href=location=/a/.source"),
    *("../../etc/passwd", "/", "\\", "{{7*7}}", "${IFS}", "$(id)", "`id`", "%s%n", "'", '"', ";"),
    *("\x00", "\n", "\r\n", "\x1b[2J", "\u202e", "\ufeff", "é", " ", "y x=[1(] \\"),
)
_WHOLE = ("", ".", "..", "-rf", "--help", "x" * 300)


class Faults:
    """Injects faults into the processes of a chaos run's cluster.

    `namespace`: network of the first server; None: no partitions.
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
            "client-kill": self._kill,
            "client-hang": self._hang,
            "client-drain": self._drain,
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
        """Names of the processes that a fault hits; empty if it hits none, such as a new placement."""
        fixed = {
            "monitor": "monitor",
            "pause": "monitor",
            "balancer": "balancer",
            "damaged": DAMAGED,
        }
        if fault.kind in fixed:
            return [fixed[fault.kind]]
        whose = CLIENT if fault.kind in CLIENTS else SERVER
        return [f"{whose}{number}" for number in fault.numbers]

    def strike(self, fault: Fault) -> Steps:
        """Inject a fault and mend it, step by step; yields the pause before each next step.

        Raises EaasError: the cluster cannot be mended, or accepted what it must refuse.
        """
        return self._kinds[fault.kind](fault, self.targets(fault))

    def calm(self) -> None:
        """Resume every process that a fault stopped by a signal; at the end of a run, also after an error."""
        for child in self._cluster.children.values():
            child.signal(signal.SIGCONT)

    def _child(self, name: str) -> ChildProcess:
        return self._cluster.children[name]

    def _kill(self, fault: Fault, names: list[str]) -> Steps:
        for name in names:
            self._child(name).signal(signal.SIGKILL)
        yield fault.lasts_s
        for name in names:
            yield from self._restart(name)

    def _restart(self, name: str) -> Steps:
        yield from self._ready(self._cluster.start_again(name))

    def _ready(self, child: ChildProcess, within_s: float = _READY_S) -> Steps:
        deadline = time.monotonic() + within_s
        while True:
            child.read()
            if child.address is not None:
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"{child.name} was not ready after {within_s:.0f} s")
            yield _POLL_S

    def _hang(self, fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        self._child(name).signal(signal.SIGSTOP)
        yield fault.lasts_s
        self._child(name).signal(signal.SIGCONT)

    def _drain(self, fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        self._child(name).signal(signal.SIGTERM)
        deadline = time.monotonic() + _SCALE_S
        while self._child(name).running:
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} did not leave within {_SCALE_S:.0f} s")
            yield _POLL_S
        yield fault.lasts_s
        yield from self._restart(name)

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
        for link in ("monitor", "data"):
            self._namespace.cut(link)
        yield fault.lasts_s
        for link in ("monitor", "data"):
            self._namespace.mend(link)

    def _memory(self, fault: Fault, names: list[str]) -> Steps:
        (name,) = names
        self._child(name).signal(signal.SIGKILL)
        yield fault.lasts_s
        self._cluster.shared_memory[name] = _SMALL_BYTES
        try:
            yield from self._restart(name)
        except EaasError as error:
            if "/dev/shm: asked for" not in str(error):
                raise
        else:
            raise ClusterError(f"{name} started although shared memory is full")
        yield from self._restart(name)

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
                    # A roll-out is running, or a server in it has just died.
                    if time.monotonic() > deadline:
                        raise ClusterError(f"the placement was never accepted: {error}") from error
                yield 4 * _POLL_S

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
                    with BalancerClient(str(self._child("balancer").address)) as balancer:
                        balancer.drain(child.name)
                    asked = True
            except ClusterError:
                # The balancer is down, or has not yet seen which servers are back.
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise ClusterError(f"{child.name} did not leave within {_SCALE_S:.0f} s")
            yield 4 * _POLL_S
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
            yield from self._reported(child, fault.lasts_s)
        finally:
            child.signal(signal.SIGKILL)
            self._cluster.forget(child.name)

    def _reported(self, child: ChildProcess, lasts_s: float) -> Steps:
        """Check that an unreachable server gets no experts, until `lasts_s` after the client reports it."""
        deadline, until = time.monotonic() + _READY_S, math.inf
        while time.monotonic() < until:
            try:
                members = fetch_status(self._cluster.endpoint)["members"]
            except ClusterError:
                members = []
            for member in (m for m in members if m["id"] == child.name):
                if member["experts"]:
                    raise ClusterError(f"{child.name} got experts although no client reaches it")
                if member["unreachable"] and math.isinf(until):
                    until = time.monotonic() + lasts_s
            if math.isinf(until) and time.monotonic() > deadline:
                raise ClusterError(f"no client reports that {child.name} is unreachable")
            yield 4 * _POLL_S

    def _names(self, fault: Fault, _names: list[str]) -> Steps:
        dice = random.Random(fault.dice)
        now = time.monotonic()
        until, deadline = now + fault.lasts_s, now + _READY_S
        refused = 0
        # Another fault may have stopped the monitor for some time.
        while time.monotonic() < until or not refused:
            refused += is_refused(self._cluster.monitor_address, hostile_name(dice))
            if not refused and time.monotonic() > deadline:
                raise ClusterError("the monitor does not answer")
            yield _POLL_S


def _any_placement(now: Placement, redundancy: int, dice: np.random.Generator) -> Placement:
    """Draw the placement of a "rebalance": `redundancy` random servers per expert, with random shares."""
    holds_LSE = dice.random(now.holds_LSE.shape).argsort(axis=1).argsort(axis=1) < redundancy
    shares_LSE = np.where(holds_LSE, 0.1 + dice.random(holds_LSE.shape), 0)
    shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
    return Placement(0, now.servers, holds_LSE, shares_LSE.astype(np.float32))


def damaged_copy(model: Path, copy: Path, dice: random.Random) -> None:
    """Copy a checkpoint and flip one bit of each of its experts, for the fault "damaged".

    `dice`: draws the tensor, the byte and the bit.
    """
    shutil.copytree(model, copy)
    checkpoint = Checkpoint.open(copy)
    parts: dict[tuple[int, int], list[TensorSlice]] = defaultdict(list)
    for tensor in checkpoint.expert_tensors:
        whole = checkpoint.slice(tensor.key)
        if tensor.expert is not None:
            parts[tensor.layer, tensor.expert] += _stored(whole)
            continue
        for expert in range(checkpoint.shape.num_experts):
            parts[tensor.layer, expert] += _stored(whole.row(expert))
    for of_expert in parts.values():
        part = dice.choice(of_expert)
        flip(part, dice.randrange(part.nbytes), dice.randrange(8))
    checkpoint.release()


def _stored(weight: TensorSlice | QuantizedSlice) -> list[TensorSlice]:
    return list(weight.parts.values()) if isinstance(weight, QuantizedSlice) else [weight]


def flip(part: TensorSlice, at: int, bit: int) -> None:
    """Flip one bit in a tensor's file: bit `bit` of byte `at` of the tensor."""
    with Path(part.shard.place).open("r+b") as file:
        file.seek(part.offset + at)
        (byte,) = file.read(1)
        file.seek(part.offset + at)
        file.write(bytes([byte ^ (1 << bit)]))


def hostile_name(dice: random.Random) -> str:
    """Draw a random name that the monitor must refuse, for the fault "names"."""
    if dice.random() < 0.2:
        return dice.choice(_WHOLE)
    pieces = ["expert-server-", dice.choice(_PIECES), dice.choice(("0", dice.choice(_PIECES)))]
    dice.shuffle(pieces)
    return "".join(pieces)


def is_refused(monitor_address: str, name: str, within_s: float = 2.0) -> bool:
    """Whether the monitor refuses an expert server of this name; False if it does not answer in time.

    Raises ClusterError: the monitor registers the server, or refuses it for another reason.
    """
    member = common_pb2.Member(
        id=name, role=Role.EXPERT_SERVER.number, pid=1, state=common_pb2.MEMBER_STATE_SERVING
    )
    request = monitor_pb2.RegisterRequest(member=member, protocol_version=PROTOCOL_VERSION)
    with channel(monitor_address, Role.MONITOR.value, None) as line:
        try:
            monitor_pb2_grpc.MonitorServiceStub(line).Register(request, timeout=within_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return True
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            why = f"{error.code().name}: {error.details()}"
            raise ClusterError(f"the name {name!r} was refused as {why}") from error
    raise ClusterError(f"the monitor registered a server as {name!r}")

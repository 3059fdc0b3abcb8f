"""Replays of other projects' balancers (peers), run from checkouts of theirs, and of ours over traces.

A peer's module is loaded by its file's path, with stand-ins for the few imports that planning does not need.
Peers plan for a full slot table: `slots / servers` experts for each server.
Shape suffixes: W window, L layers, S servers, K slots of a server, E logical experts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies import Plan
from balancer.policies.plan import make_plan
from balancer.policies.problem import make_problem
from balancer.policies.sparse import Layout
from eaas.errors import ConfigError
from eaas_cli.bench.command import say
from eaas_cli.console import print_rows
from simulator.placement.planners import DISPATCH, SPLIT, Planner, make_planner, parse_name
from simulator.placement.replay import Replay, replay
from simulator.placement.score import score
from simulator.traces import Trace, read_trace

__all__ = [
    "PEERS",
    "PeerPlanner",
    "checkouts",
    "compare_peers",
    "first_table",
    "print_peers",
    "table_layout",
]

_OURS = ("eplb", "fractional")

Table = npt.NDArray[np.int64]
Counts = npt.NDArray[Any]
# Plan from a window: (W, L, E) counts and the current table (L, S, K) give the new table.
Rebalance = Callable[[Counts, Table], Table]


@dataclass(frozen=True)
class Peer:
    """A balancer of another project.

    Attributes:
        project: The name of its checkout, for `--peer`.
        folder: The package in the checkout that has its file.
        files: Files of the package, in the order of loading; the last has the balancer.
        known: A version that is known to work.
        stubs: Modules to stand in for, and their names.
        start: Makes the function that plans, for one replay.
    """

    project: str
    folder: str
    files: tuple[str, ...]
    known: str
    stubs: dict[str, dict[str, Any]]
    start: Callable[[ModuleType, int], Rebalance]

    def load(self, checkout: Path) -> ModuleType:
        """Load the balancer's module. Raises ConfigError if a file or an import is missing."""
        folder = checkout / self.folder
        for name in self.files:
            if not (folder / name).is_file():
                raise ConfigError(
                    f"--peer {self.project}={checkout}: there is no {folder / name}; give a checkout of "
                    f"{self.known}, which is known to work"
                )
        package = "eaas_peer_" + self.project.replace("-", "_")
        root = ModuleType(package)
        root.__path__ = [str(folder)]
        with _present(
            {package: root, **{name: _stub(name, has) for name, has in self.stubs.items()}}
        ):
            for name in self.files:
                module = _loaded(
                    f"{package}.{name.removesuffix('.py')}", folder / name, self.project
                )
        return module


@contextmanager
def _present(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Let imports find these modules, and those loaded meanwhile, only for now."""
    before = dict(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name)
            if name in before:
                sys.modules[name] = before[name]


def _stub(name: str, has: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(has)
    return module


def _loaded(name: str, path: Path, project: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The next files import it. It stays, because its functions are compiled when they are called first.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--peer {project}: {path} cannot be loaded: {error}; install it"
        ) from error
    return module


def checkouts(given: list[str]) -> dict[str, Path]:
    """Read the option's NAME=PATH. Raises ConfigError."""
    projects = sorted({peer.project for peer in PEERS.values()})
    found = {}
    for text in given:
        project, _, path = text.partition("=")
        if project not in projects or not path:
            raise ConfigError(f"--peer {text}: give NAME=PATH, NAME one of {', '.join(projects)}")
        if not Path(path).is_dir():
            raise ConfigError(f"--peer {text}: there is no directory {path}")
        found[project] = Path(path)
    return found


class PeerPlanner:
    """Plans of a peer in a replay.

    Its first table has experts in the order of their ids, and in the last slots those of the next servers.
    Raises ConfigError if servers have different numbers of slots.
    """

    def __init__(self, peer: Peer, module: ModuleType, servers: int, slots: int) -> None:
        if slots % servers:
            raise ConfigError(f"slots {slots}: peers need as many on each of {servers} servers")
        self._peer, self._module = peer, module
        self._servers, self._slots = servers, slots
        self._rebalance: Rebalance | None = None
        self._table_LSK = np.empty((0, 0, 0), np.int64)

    def step(
        self, counts_WLE: Counts, load_LE: npt.NDArray[np.float64], current: Layout
    ) -> Callable[[], Plan]:
        """Prepare the next plan."""
        if self._rebalance is None:
            self._rebalance = self._peer.start(self._module, self._servers)
            self._table_LSK = first_table(
                len(load_LE), load_LE.shape[1], self._servers, self._slots
            )
        rebalance = self._rebalance

        def think() -> Plan:
            self._table_LSK = np.asarray(rebalance(counts_WLE, self._table_LSK), np.int64)
            problem = make_problem(load_LE, self._servers, self._slots, current)
            return make_plan("peer", problem, table_layout(self._table_LSK, load_LE.shape[1]))

        return think


def first_table(layers: int, experts: int, servers: int, slots: int) -> Table:
    """int64 (L, S, K): a table that holds every expert."""
    own = slots // servers
    order_N = np.full(servers * own, -1, np.int64)
    blocks = np.array_split(np.arange(experts), servers)
    table_SK = order_N.reshape(servers, own)
    for server, block in enumerate(blocks):
        table_SK[server, : len(block)] = block
    for server in range(servers):
        free = np.flatnonzero(table_SK[server] < 0)
        others = np.concatenate([blocks[(server + n) % servers] for n in range(1, servers + 1)])
        table_SK[server, free] = np.resize(others, len(free))
    return np.broadcast_to(table_SK, (layers, servers, own)).copy()


def table_layout(table_LSK: Table, experts: int) -> Layout:
    """Make the layout of a table: each slot of an expert has an equal share."""
    layers, servers, _ = table_LSK.shape
    counts_LSE = np.zeros((layers, servers, experts))
    layer, server, _ = np.indices(table_LSK.shape)
    np.add.at(counts_LSE, (layer, server, table_LSK), 1)
    held_LE = counts_LSE.sum(axis=1, keepdims=True)
    if (held_LE == 0).any():
        raise ValueError("a peer's table leaves experts without a replica")
    return Layout.of(counts_LSE > 0, counts_LSE / held_LE)


def _slot_loads(counts_WLE: Counts, table_LSK: Table) -> npt.NDArray[np.float32]:
    """float32 (W, L, S, K): what each slot had, if the tokens of an expert are dealt evenly to its slots."""
    experts = counts_WLE.shape[2]
    flat_LN = table_LSK.reshape(len(table_LSK), -1)
    slots_LE = np.stack([np.bincount(flat_N, minlength=experts) for flat_N in flat_LN])
    each_WLE = counts_WLE.astype(np.float32) / slots_LE.astype(np.float32)
    found = np.take_along_axis(each_WLE, flat_LN[None], axis=2)
    return np.asarray(found.reshape(len(counts_WLE), *table_LSK.shape), np.float32)


def _by_loads(
    call: Callable[[ModuleType, Any, Any, int, int], Any],
) -> Callable[[ModuleType, int], Rebalance]:
    """Start a peer without state: `call` gets tensors (W, L, E) and (L, N), the slots N, the servers."""

    def start(module: ModuleType, servers: int) -> Rebalance:
        import torch

        def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
            counts = torch.from_numpy(counts_WLE.astype(np.float64))
            old_LN = torch.from_numpy(table_LSK.reshape(len(table_LSK), -1))
            found = call(module, counts, old_LN, old_LN.shape[1], servers)
            return np.asarray(found).reshape(table_LSK.shape)

        return rebalance

    return start


_vllm = _by_loads(
    lambda module, counts, old, slots, servers: module.DefaultEplbPolicy.rebalance_experts(
        counts.sum(0), slots, 1, 1, servers, old
    )
)
_sglang = _by_loads(
    lambda module, counts, _, slots, servers: module.rebalance_experts(
        counts.sum(0), slots, 1, 1, servers, enable_hierarchical=False
    )[0]
)
_sglang_vec = _by_loads(
    lambda module, counts, _, slots, servers: module.rebalance_experts(
        counts.float(), slots, slots // servers, 1, 1, enable_hierarchical=False
    )[0]
)


def _swift(module: ModuleType, servers: int) -> Rebalance:
    import torch

    # It asks only how many devices a host has, for plans of whole hosts, which are not its default.
    module.torch = SimpleNamespace(npu=SimpleNamespace(device_count=lambda: servers))  # type: ignore[attr-defined]
    balancer = module.SwiftBalanceEplb()

    def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
        sums_LSK = _slot_loads(counts_WLE.sum(axis=0, keepdims=True), table_LSK)[0]
        changed, _, found = balancer.rebalance_experts(
            torch.from_numpy(table_LSK.copy()), torch.from_numpy(sums_LSK)
        )
        return np.asarray(found) if changed else table_LSK

    return rebalance


def _flashlb(module: ModuleType, servers: int) -> Rebalance:
    # Its thresholds depend on the number of servers.
    module.get_dynamic_eplb_group = lambda: SimpleNamespace(world_size=servers)  # type: ignore[attr-defined]
    balancer = module.FlashLB()

    def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
        loads = _slot_loads(counts_WLE, table_LSK)
        _, changed, found = balancer.rebalance_experts(table_LSK, loads)
        table_LSK = table_LSK.copy()
        table_LSK[changed] = found[changed]
        return table_LSK

    return rebalance


class _Silent:
    """Stands in for a logger."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_ASCEND = "vllm_ascend/eplb/core/policy"
_ASCEND_KNOWN = "vllm-project/vllm-ascend at commit 182b75ea84ff13ece27b57391331ef8935410aea"
_SGLANG = "python/sglang/srt/eplb/eplb_algorithms"
_SGLANG_KNOWN = "sgl-project/sglang, release 0.5.23"
_ASCEND_STUBS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.logger": {"logger": _Silent()},
    "vllm_ascend": {},
    "vllm_ascend.distributed": {},
    "vllm_ascend.distributed.parallel_state": {"get_dynamic_eplb_group": None},
    "torch_npu": {},
}

PEERS = {
    "vllm": Peer(
        "vllm",
        "vllm/distributed/eplb/policy",
        ("abstract.py", "default.py"),
        "vllm-project/vllm, release 0.32.0",
        {},
        _vllm,
    ),
    "sglang": Peer("sglang", _SGLANG, ("deepseek.py",), _SGLANG_KNOWN, {}, _sglang),
    "sglang-vec": Peer("sglang", _SGLANG, ("deepseek_vec.py",), _SGLANG_KNOWN, {}, _sglang_vec),
    "swift": Peer(
        "vllm-ascend",
        _ASCEND,
        ("policy_abstract.py", "policy_swift_balancer.py"),
        _ASCEND_KNOWN,
        _ASCEND_STUBS,
        _swift,
    ),
    "flashlb": Peer(
        "vllm-ascend",
        _ASCEND,
        ("policy_abstract.py", "policy_flashlb.py"),
        _ASCEND_KNOWN,
        _ASCEND_STUBS,
        _flashlb,
    ),
}
"""The balancers, by the name of their rows."""


class _Repeated:
    """Plans once for several replays that differ only in how clients divide their batches."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._plans: list[Plan] = []
        self._next = 0

    def again(self) -> _Repeated:
        self._next = 0
        return self

    def step(
        self, counts_WLE: Counts, load_LE: npt.NDArray[np.float64], current: Layout
    ) -> Callable[[], Plan]:
        self._next += 1
        if self._next <= len(self._plans):
            found = self._plans[self._next - 1]
            return lambda: found
        think = self._planner.step(counts_WLE, load_LE, current)

        def plan() -> Plan:
            self._plans.append(think())
            return self._plans[-1]

        return plan


def compare_peers(
    given: Sequence[str],
    paths: Sequence[Path],
    *,
    policies: Sequence[str] = (),
    servers: int,
    interval: int,
) -> dict[str, Any]:
    """Replay the peers whose checkouts are given, and policies of ours, over traces.

    Each plan is replayed by its shares, with the best split of each batch (a bound), and as an attention
    client dispatches the batch. Peers deal an expert's tokens evenly to its slots.

    Args:
        given: Checkouts, as NAME=PATH.
        paths: Files of the traces.
        policies: Names of ours; empty: `eplb` and `fractional`.
        servers: S; each has as many slots, E / S + 1.
        interval: Iterations between plans.

    Returns:
        The JSON document: `rows` with trace, balancer, interval, `par`, `par_split`, `par_dispatch`, transit,
        score (of the shares; 100: our EPLB at this interval), plan_ms.

    Raises:
        ConfigError: An unknown name, a file or module that a checkout lacks, or slots that do not divide.
        TraceError: A file is no trace.
    """
    traces = {path.stem: read_trace(path) for path in paths}
    found = checkouts(list(given))
    ours = tuple(policies) or _OURS
    for policy in ours:
        if parse_name(policy)[1]:
            raise ConfigError(
                f"--policy {policy}: give it without an ending, because each is replayed"
            )
    modules = {
        name: peer.load(found[peer.project])
        for name, peer in PEERS.items()
        if peer.project in found
    }
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        slots = trace.experts + servers
        first_s: float | None = None
        for balancer in (*dict.fromkeys(("eplb", *ours)), *modules):
            planner: Planner | None
            if balancer in modules:
                planner = PeerPlanner(PEERS[balancer], modules[balancer], servers, slots)
            else:
                planner = make_planner(balancer, servers, slots)
            say(f"{name}: {balancer}")
            plain, split, dispatched = _replays(trace, balancer, planner, servers, interval)
            first_s = plain.time_s if first_s is None else first_s
            rows.append(
                {
                    "trace": name,
                    "balancer": balancer,
                    "interval": interval,
                    "par": plain.par_mean,
                    "par_split": split.par_mean,
                    "par_dispatch": dispatched.par_mean,
                    "transit": plain.transit,
                    "score": score(plain.time_s, first_s),
                    "plan_ms": 1e3 * plain.plan_s,
                }
            )
    return {"rows": rows, "checkouts": {name: str(path) for name, path in found.items()}}


def _replays(
    trace: Trace, balancer: str, planner: Planner | None, servers: int, interval: int
) -> list[Replay]:
    """Replay the same plans by their shares, with the best split, and as a client dispatches."""
    repeated = None if planner is None else _Repeated(planner)
    return [
        replay(
            trace,
            balancer + ending,
            servers=servers,
            interval=interval,
            planner=None if repeated is None else repeated.again(),
        )
        for ending in ("", SPLIT, DISPATCH)
    ]


def print_peers(document: dict[str, Any]) -> None:
    """Print a row per trace and balancer."""
    print_rows(document["rows"])
    print(
        "par: by the plan's shares; split: best split of each batch, a bound; dispatch: as a client does\n"
        "score: of the shares; 100: eplb. plan ms: processor time of a plan, the first included"
    )

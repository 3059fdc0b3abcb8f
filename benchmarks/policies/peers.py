"""Balancers of other projects, run from a checkout of theirs: each as a planner of our replays.

A peer's module is loaded by its file's path, with stand-ins for the few imports that planning does not need.
Peers plan for a full slot table: `slots / servers` experts for each server.
Shape suffixes: W window, L layers, S servers, K slots of a server, E logical experts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from balancer.policies import Plan
from balancer.policies.plan import make_plan
from balancer.policies.problem import make_problem
from balancer.policies.sparse import Layout
from eaas.errors import ConfigError

__all__ = ["PEERS", "Peer", "PeerPlanner", "checkouts"]

Table = npt.NDArray[np.int64]
Counts = npt.NDArray[Any]


class Rebalance(Protocol):
    """Plan from a window: (W, L, E) counts and the current table (L, S, K) give the new table."""

    def __call__(self, counts_WLE: Counts, table_LSK: Table) -> Table:
        """Return the new table."""
        ...


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


def _vllm(module: ModuleType, servers: int) -> Rebalance:
    import torch

    def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
        load_LE = torch.from_numpy(counts_WLE.sum(axis=0, dtype=np.float64))
        old_LN = torch.from_numpy(table_LSK.reshape(len(table_LSK), -1))
        found = module.DefaultEplbPolicy.rebalance_experts(
            load_LE, old_LN.shape[1], 1, 1, servers, old_LN
        )
        return np.asarray(found).reshape(table_LSK.shape)

    return rebalance


def _sglang(module: ModuleType, servers: int) -> Rebalance:
    import torch

    def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
        load_LE = torch.from_numpy(counts_WLE.sum(axis=0, dtype=np.float64))
        slots = table_LSK[0].size
        found = module.rebalance_experts(load_LE, slots, 1, 1, servers, enable_hierarchical=False)
        return np.asarray(found[0]).reshape(table_LSK.shape)

    return rebalance


def _sglang_vec(module: ModuleType, servers: int) -> Rebalance:
    import torch

    def rebalance(counts_WLE: Counts, table_LSK: Table) -> Table:
        counts = torch.from_numpy(counts_WLE.astype(np.float32))
        slots = table_LSK[0].size
        found = module.rebalance_experts(
            counts, slots, slots // servers, 1, 1, enable_hierarchical=False
        )
        return np.asarray(found[0]).reshape(table_LSK.shape)

    return rebalance


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

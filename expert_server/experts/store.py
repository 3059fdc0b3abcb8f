"""The experts that an expert server holds, in the kernel's layout; the balancer's calls change them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType

from eaas.checkpoint.pieces import Pause, at_once
from eaas.errors import CheckpointError, ExpertMismatchError
from eaas.memory import trim
from expert_server.experts.load_throttling import LoadThrottle
from expert_server.kernels import ExpertKernel
from expert_server.loop.loop import ServeLoop
from expert_server.weights.background import compute_alone, step_back
from expert_server.weights.reader import ExpertReader
from expert_server.weights.sharing import Pace
from expert_server.weights.weights import ExpertWeights

__all__ = ["Digests", "ExpertStore", "naming_expert"]

Digests = Mapping[tuple[int, int], int]
"""(MoE layer, logical expert) -> digest of its bytes."""

# Packing leaves holes in malloc's memory. Without trimming, 300 MB of weights take a quarter more.
_TRIM_BYTES = 64 << 20


class ExpertStore:
    """Loads and unloads expert replicas while the kernel computes; batches never wait for a load.

    Args:
        reader: Reads the weights.
        kernel: Owns the weights once loaded, in its layout.
        bytes_per_s: Limit of the loading rate while replicas are held; 0: no limit.
        loop: Loads are throttled in favour of its batches (see `load_throttling`); None: no throttling.
        memory_bytes: Limit that spare replicas respect; 0: none. The balancer keeps to it for all others.
    """

    def __init__(
        self,
        reader: ExpertReader,
        kernel: ExpertKernel,
        bytes_per_s: int = 0,
        loop: ServeLoop | None = None,
        memory_bytes: int = 0,
    ) -> None:
        self._reader = reader
        self._kernel = kernel
        self._bytes_per_s = bytes_per_s
        self._loop = loop
        self._memory_bytes = memory_bytes
        # Replaced, never changed, because any thread may read it. Includes replicas that are about to load.
        self._spares: frozenset[tuple[int, int]] = frozenset()
        self._count = 0
        self._digests: dict[tuple[int, int], int] = {}
        self._changing = threading.Lock()
        self._loading = (0, 0)

    @property
    def count(self) -> int:
        """Number of expert replicas held, without spares, for heartbeats; a leaving server waits for 0."""
        return self._count

    @property
    def bytes(self) -> int:
        """Memory of the replicas held, also in spare slots, in the kernel's layout, in bytes."""
        return self._kernel.bytes

    @property
    def expert_bytes(self) -> int:
        """Mean memory of a replica, in bytes, for ReadHotness; 0 without any."""
        return self._kernel.bytes // max(self._kernel.count, 1)

    @property
    def loading(self) -> tuple[int, int]:
        """Checkpoint bytes that the current load takes, and how many of them are loaded, for heartbeats.

        (0, 0) while nothing loads. Any thread may read it.
        """
        return self._loading

    def holds(self, layer: int, expert: int) -> bool:
        """Whether this server holds a replica of the expert, so that its kernel can compute it."""
        return self._kernel.holds(layer, expert)

    def held(self) -> dict[int, list[int]]:
        """The experts held, without spares, MoE layer -> logical experts, for the balancer."""
        experts, spares = range(self._reader.num_experts), self._spares
        return {
            layer: [e for e in experts if self.holds(layer, e) and (layer, e) not in spares]
            for layer in range(len(self._reader.forms))
        }

    @property
    def spares(self) -> frozenset[tuple[int, int]]:
        """The replicas in spare slots: (MoE layer, logical expert)."""
        return frozenset(place for place in self._spares if self.holds(*place))

    def digest(self, layer: int, expert: int) -> int:
        """XXH3 of the bytes that a replica was read from; 0 if it is not held.

        The balancer passes it on, so that each server can compare: an expert's replicas must be equal.
        """
        return self._digests.get((layer, expert), 0)

    def load(
        self,
        wanted: Mapping[int, Collection[int]],
        is_given_up: Callable[[], bool] = lambda: False,
        digests: Digests = MappingProxyType({}),
    ) -> int:
        """Load those of the wanted replicas that are missing, layer by layer; batches use each one at once.

        Args:
            wanted: MoE layer -> logical experts, in loading order.
            is_given_up: Called after each expert; if true, loading stops.
            digests: The known digests of the experts' bytes.

        Returns:
            Bytes of weights newly held.

        Raises:
            MissingShardError, CorruptShardError: A tensor cannot be read; names the file and the tensor.
            ExpertMismatchError: An expert's bytes have another digest; names the files and the tensors. The
                expert is not held, even if it was before.
            CheckpointError: A weight to be quantised is NaN or infinite; names the layer and the expert.
            DeviceFullError: The kernel's device has no memory left for an expert; names it.
            DeviceLostError: The kernel's device has failed.

        After an error, all other replicas stay.
        """
        with self._changing:
            self._spares -= {(layer, expert) for layer in wanted for expert in wanted[layer]}
            self._recount()
            return self._load_in_background(wanted, is_given_up, digests)

    def load_spares(
        self,
        wanted: Collection[tuple[int, int]],
        is_given_up: Callable[[], bool],
        digests: Digests,
    ) -> None:
        """Load replicas into spare slots: those that are missing, as many as fit into the memory.

        Args:
            wanted: (MoE layer, logical expert) pairs.
            is_given_up, digests: See `load`, also for the errors.
        """
        with self._changing:
            missing = [place for place in sorted(wanted) if not self.holds(*place)]
            by_layer: dict[int, list[int]] = {}
            for layer, expert in missing:
                by_layer.setdefault(layer, []).append(expert)
            self._spares |= frozenset(missing)
            try:
                if self._has_room():
                    self._load_in_background(
                        by_layer, lambda: is_given_up() or not self._has_room(), digests
                    )
            finally:
                self._spares = self.spares

    def unload_spares(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Empty the spare slots, except for some replicas."""
        unwanted: dict[int, list[int]] = {}
        for layer, expert in self._spares.difference(kept):
            unwanted.setdefault(layer, []).append(expert)
        self.unload(unwanted)

    def _has_room(self) -> bool:
        """Whether a replica of mean size fits into the memory."""
        return not self._memory_bytes or self.bytes + self.expert_bytes <= self._memory_bytes

    def _load_in_background(
        self,
        wanted: Mapping[int, Collection[int]],
        is_given_up: Callable[[], bool],
        digests: Digests,
    ) -> int:
        # While experts are held, the kernel needs the cores: copying and packing use a single one. Before
        # that, the load only gives way to other processes of the machine.
        if self._kernel.count:
            with ThreadPoolExecutor(1, "load", compute_alone) as thread:
                return thread.submit(self._load, wanted, is_given_up, digests).result()
        with (
            ThreadPoolExecutor(1, "load", step_back) as thread,
            ThreadPoolExecutor(1, "read", step_back) as ahead,
        ):
            return thread.submit(self._load, wanted, is_given_up, digests, ahead).result()

    def _load(
        self,
        wanted: Mapping[int, Collection[int]],
        is_given_up: Callable[[], bool],
        digests: Digests,
        ahead: Executor | None = None,
    ) -> int:
        self._drop_mismatched(wanted, digests)
        missing = {
            layer: {expert for expert in experts if not self.holds(layer, expert)}
            for layer, experts in wanted.items()
        }
        size = {layer: self._reader.expert_bytes(layer) for layer, some in missing.items() if some}
        self._loading = sum(len(missing[layer]) * size[layer] for layer in size), 0
        before = trimmed = self.bytes
        # Nothing is read ahead unless no batch needs the cores.
        pause = (
            at_once if self._loop is None or ahead is not None else LoadThrottle(self._loop).wait
        )
        pace = Pace(self._bytes_per_s) if self._bytes_per_s and self._kernel.count else None
        try:
            for layer in size:
                differing = []
                for expert, weights in self._reader.read(layer, missing[layer], pause, ahead):
                    if weights.digest != digests.get((layer, expert), weights.digest):
                        differing.append(expert)
                        continue
                    self._hold(layer, expert, weights, pause)
                    self._count_loaded(size[layer])
                    if pace is not None:
                        pace.take(weights.nbytes)
                    del weights  # A view of a chunk that the reader is about to reuse.
                    if is_given_up():
                        return self.bytes - before
                    if self.bytes - trimmed >= _TRIM_BYTES:
                        trimmed = self.bytes
                        trim()
                for expert in differing:
                    self._load_from_others(layer, expert, pause, digests[layer, expert])
                    self._count_loaded(size[layer])
        finally:
            self._loading = 0, 0
            self._reader.release()
        return self.bytes - before

    def _count_loaded(self, nbytes: int) -> None:
        total, loaded = self._loading
        # One assignment, so that no heartbeat sees one number without the other.
        self._loading = total, loaded + nbytes

    def _hold(self, layer: int, expert: int, weights: ExpertWeights, pause: Pause) -> None:
        with naming_expert(layer, expert):
            self._kernel.load(layer, expert, weights, pause)
        self._digests[layer, expert] = weights.digest
        self._recount()

    def _load_from_others(self, layer: int, expert: int, pause: Pause, digest: int) -> None:
        """Read an expert with a wrong digest again, from one server after another, until it matches."""
        for _ in self._reader.elsewhere():
            for _, weights in self._reader.read(layer, [expert], pause):
                if weights.digest == digest:
                    self._hold(layer, expert, weights, pause)
                    return
        raise self._mismatch(layer, expert)

    def _drop_mismatched(self, wanted: Mapping[int, Collection[int]], digests: Digests) -> None:
        """Unload replicas that differ from the cluster's, and raise ExpertMismatchError if there are any."""
        mismatched = [
            (layer, expert)
            for layer, experts in wanted.items()
            for expert in experts
            if (held := self.digest(layer, expert)) and held != digests.get((layer, expert), held)
        ]
        for layer, expert in mismatched:
            self._unload(layer, expert)
        if mismatched:
            raise self._mismatch(*mismatched[0])

    def _mismatch(self, layer: int, expert: int) -> ExpertMismatchError:
        return ExpertMismatchError(
            f"{self._reader.place_of(layer, expert)} (layer {layer}, expert {expert}) differs from the "
            "cluster's other replicas: copy the checkpoint again from a server that serves; if this copy is "
            "the right one, start the whole cluster again with it"
        )

    def unload(self, unwanted: Mapping[int, Collection[int]]) -> None:
        """Unload expert replicas and free their memory; requests for them become STALE_PLACEMENT."""
        with self._changing:
            before = self.bytes
            for layer, experts in unwanted.items():
                for expert in experts:
                    self._unload(layer, expert)
            if self.bytes < before:
                trim()

    def _unload(self, layer: int, expert: int) -> None:
        self._kernel.unload(layer, expert)
        self._digests.pop((layer, expert), None)
        self._spares -= {(layer, expert)}
        self._recount()

    def _recount(self) -> None:
        # One number for all readers: two that change apart could give a difference that never was.
        self._count = self._kernel.count - len(self.spares)


@contextmanager
def naming_expert(layer: int, expert: int) -> Iterator[None]:
    """Add the layer and the expert to the message of a CheckpointError raised in the block; keep its type."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"layer {layer}, expert {expert}: {error}") from error

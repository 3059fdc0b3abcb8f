"""Serves placement calls on an expert server: the balancer has it load or unload experts.

A placement takes two calls. Prepare loads this server's share in addition to the experts held; retire unloads
all others, once no client uses an older placement. Requests are served throughout. A request for an expert
that was just unloaded is answered STALE_PLACEMENT, and the client sends it elsewhere.

The balancer sends the digests that it has of the experts' bytes. If one is missing, this server returns the
digests it read and waits for the same call with all of them: a placement is in force here once every expert
of the share has been compared.

Beside the share there are spare replicas, which the balancer changes more often and without clients'
acknowledgement (HoldSpares). A roll-out unloads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import grpc

from eaas.control_plane.expert_calls import MISMATCH_KEY
from eaas.errors import CheckpointError, DeviceFullError, DeviceLostError, ExpertMismatchError
from eaas.log import get_logger
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.spares import holdings, places
from eaas.types import ModelShape
from expert_server.experts.store import Digests, ExpertStore

__all__ = ["PlacementHandler"]

_log = get_logger(__name__)


class PlacementHandler:
    """Serves the balancer's placement calls (`expert.proto`). Thread-safe.

    Args:
        store: Holds the weights.
        shape: The model's shape.
        on_prepared: Called with the epoch once a share is loaded.
        on_retired: Called with the epoch once all other experts are unloaded.
        is_limited: Whether the memory for experts is limited.
        on_unloadable: Called before the reply if an expert cannot be loaded, or differs from other servers'.
        on_lost: Called before the reply if the kernel's device has failed.
    """

    CALLS: ClassVar = ("PreparePlacement", "RetirePlacement", "HoldSpares", "ListExperts")

    def __init__(
        self,
        store: ExpertStore,
        shape: ModelShape,
        on_prepared: Callable[[int], None],
        on_retired: Callable[[int], None],
        is_limited: bool = False,
        on_unloadable: Callable[[CheckpointError], None] = lambda _error: None,
        on_lost: Callable[[DeviceLostError], None] = lambda _error: None,
    ) -> None:
        self._store = store
        self._shape = shape
        self._on_prepared = on_prepared
        self._on_retired = on_retired
        self._on_unloadable = on_unloadable
        self._on_lost = on_lost
        self._is_limited = is_limited
        self._changing = threading.Lock()
        self._epoch_lock = threading.Lock()
        # The newest epoch received, possibly not loaded yet.
        self._newest_epoch = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Epoch of the last placement whose share is loaded; Connect tells it to clients."""
        return self._epoch

    def PreparePlacement(
        self, request: pb.PreparePlacementRequest, context: grpc.ServicerContext
    ) -> pb.PreparePlacementResponse:
        """Load the experts that a new placement assigns to this server, in addition to those held.

        The first placement makes the server SERVING. A newer epoch ends the load: the call is aborted.
        """
        wanted = self._experts(request.layers, context)
        digests, all_known = self._digests(request.layers, context)
        in_order = dict.fromkeys((*request.layer_order, *wanted))
        wanted = {layer: wanted[layer] for layer in in_order if layer in wanted}
        epoch = request.epoch
        # Before the lock, because this ends the load of an older placement.
        self._accept_epoch(epoch, context)
        with self._changing:
            self._refuse_older(epoch, context)
            if self._is_limited:
                # The balancer does not count the memory of spare replicas.
                self._store.unload_spares(places(request.layers))
                if not self._epoch:
                    # Remains of placements abandoned before this server had a share. No client uses these
                    # experts, and the balancer does not count their memory.
                    self._keep(wanted)
            try:
                loaded = self._store.load(wanted, lambda: self._newest_epoch > epoch, digests)
            except ExpertMismatchError as error:
                self._on_unloadable(error)
                context.set_trailing_metadata(((MISMATCH_KEY, "1"),))
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except CheckpointError as error:
                self._on_unloadable(error)
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except DeviceLostError as error:
                self._on_lost(error)
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            if self._newest_epoch > epoch:
                context.abort(
                    grpc.StatusCode.ABORTED, f"epoch {self._newest_epoch} is newer than {epoch}"
                )
            if all_known:
                self._epoch = epoch
        _log.info("epoch %d: %d experts, %.1f MB read", epoch, self._store.count, loaded / 1e6)
        if all_known:
            self._on_prepared(epoch)
        return pb.PreparePlacementResponse(
            epoch=epoch,
            experts=self._store.count,
            bytes_loaded=loaded,
            layers=self._holdings(wanted),
            awaits_digests=not all_known,
        )

    def RetirePlacement(
        self, request: pb.RetirePlacementRequest, context: grpc.ServicerContext
    ) -> pb.RetirePlacementResponse:
        """Unload all experts outside this server's share. Called once no client uses an older placement."""
        kept = self._experts(request.layers, context)
        # Before the lock, because this ends a load of spare replicas.
        self._accept_epoch(request.epoch, context)
        with self._changing:
            self._refuse_older(request.epoch, context)
            self._epoch = request.epoch
            self._keep(kept)
        _log.info("epoch %d: %d experts are kept", request.epoch, self._store.count)
        self._on_retired(request.epoch)
        return pb.RetirePlacementResponse(experts=self._store.count)

    def HoldSpares(
        self, request: pb.HoldSparesRequest, context: grpc.ServicerContext
    ) -> pb.HoldSparesResponse:
        """Change the replicas in the spare slots of the placement in force (errors: `expert.proto`).

        A newer placement ends the load, and so does the end of the call.
        """
        until = time.monotonic() + request.load_s
        self._experts(request.layers, context)
        digests, all_known = self._digests(request.layers, context)
        wanted, epoch = places(request.layers), request.epoch
        if not all_known:
            # The bytes of the others could not be compared.
            wanted = wanted.intersection(digests)
        with self._changing:
            if not (epoch and self._newest_epoch == self._epoch == epoch):
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"epoch {epoch} is not in force here, {self._epoch} is",
                )
            self._store.unload_spares(wanted)
            before = len(self._store.spares)
            try:
                self._store.load_spares(
                    wanted,
                    lambda: (
                        self._newest_epoch > epoch
                        or time.monotonic() >= until
                        or not context.is_active()
                    ),
                    digests,
                )
            except DeviceLostError as error:
                self._on_lost(error)
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except DeviceFullError as error:
                # The checkpoint is whole: the balancer may try again in the next round.
                _log.warning("a spare replica cannot be loaded: %s", error)
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except CheckpointError as error:
                _log.error("a spare replica cannot be loaded: %s", error)
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            held = self._store.spares
        return pb.HoldSparesResponse(
            layers=holdings(held, self._shape.num_layers), loaded=len(held) - before
        )

    def _keep(self, kept: Mapping[int, Sequence[int]]) -> None:
        self._store.unload_spares()
        held = self._store.held()
        self._store.unload({layer: {*held[layer]} - {*kept.get(layer, ())} for layer in held})

    def ListExperts(
        self, request: pb.ListExpertsRequest, context: grpc.ServicerContext
    ) -> pb.ListExpertsResponse:
        """Tell the balancer the experts held, and the newest placement epoch received, even if not loaded."""
        held = self._store.held()
        return pb.ListExpertsResponse(
            epoch=self._newest_epoch,
            layers=self._holdings(held),
        )

    def _holdings(self, experts: Mapping[int, Sequence[int]]) -> list[common_pb2.Holding]:
        """List these experts with their digests, layer by layer, for a reply."""
        return [
            common_pb2.Holding(
                experts=experts[layer],
                digests=[self._store.digest(layer, expert) for expert in experts[layer]],
            )
            for layer in sorted(experts)
        ]

    def _digests(
        self, layers: Sequence[common_pb2.Holding], context: grpc.ServicerContext
    ) -> tuple[Digests, bool]:
        """Return the digests in the balancer's request, and whether every expert has one to compare with.

        A balancer of an older release sends none, and none are compared.
        """
        if not any(holding.digests for holding in layers):
            return {}, True
        if any(len(holding.digests) != len(holding.experts) for holding in layers):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the numbers of digests and experts differ"
            )
        digests = {
            (layer, expert): digest
            for layer, holding in enumerate(layers)
            for expert, digest in zip(holding.experts, holding.digests, strict=True)
        }
        known = {place: digest for place, digest in digests.items() if digest}
        return known, len(known) == len(digests)

    def _experts(
        self, layers: Sequence[common_pb2.Holding], context: grpc.ServicerContext
    ) -> dict[int, list[int]]:
        """Return a call's experts, MoE layer -> logical experts; abort it if they do not fit the model."""
        if len(layers) != self._shape.num_layers:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(layers)} layers, the model has {self._shape.num_layers}",
            )
        wanted = {layer: list(holding.experts) for layer, holding in enumerate(layers)}
        if any(e >= self._shape.num_experts for experts in wanted.values() for e in experts):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"expert ids must not exceed {self._shape.num_experts - 1}",
            )
        return wanted

    def _accept_epoch(self, epoch: int, context: grpc.ServicerContext) -> None:
        """Record a placement's epoch, which ends an older one's load; abort the call if a newer one came."""
        with self._epoch_lock:
            self._newest_epoch = max(self._newest_epoch, epoch)
        self._refuse_older(epoch, context)

    def _refuse_older(self, epoch: int, context: grpc.ServicerContext) -> None:
        if epoch < self._newest_epoch:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {epoch} is older than {self._newest_epoch}",
            )

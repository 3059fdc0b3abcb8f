"""What the balancer tells an expert server: load these experts, unload those.

A placement comes in two steps: first its share is loaded beside what is here already (prepare), later,
once no client uses an older placement, everything else is unloaded (retire). Requests are served all the
while; one for an expert that was just unloaded is answered STALE_PLACEMENT, and goes elsewhere.

The balancer sends the digests of experts' bytes that it knows. Where one is missing, this server says what it
read and waits for the same call with all of them: a placement is in force here once every expert of the share
was compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import grpc

from eaas.errors import CheckpointError, ExpertMismatchError
from eaas.expert_calls import MISMATCH_KEY
from eaas.log import get_logger
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape
from expert_server.store import Digests, ExpertStore

__all__ = ["PlacementHandler"]

_log = get_logger(__name__)


class PlacementHandler:
    """The calls of `expert.proto` that are the balancer's. Any thread may call it.

    Args:
        store: Weights.
        shape: Of the model.
        on_prepared: Called with the epoch once a share is loaded.
        on_retired: Called with the epoch once everything else is unloaded.
        is_limited: Whether the memory for experts is.
        on_mismatch: Called where an expert's bytes here are not those of other servers, before the balancer
            is told.
    """

    CALLS: ClassVar = ("PreparePlacement", "RetirePlacement", "ListExperts")

    def __init__(
        self,
        store: ExpertStore,
        shape: ModelShape,
        on_prepared: Callable[[int], None],
        on_retired: Callable[[int], None],
        is_limited: bool = False,
        on_mismatch: Callable[[ExpertMismatchError], None] = lambda _error: None,
    ) -> None:
        self._store = store
        self._shape = shape
        self._on_prepared = on_prepared
        self._on_retired = on_retired
        self._on_mismatch = on_mismatch
        self._is_limited = is_limited
        self._changing = threading.Lock()
        self._telling = threading.Lock()
        # Of the newest placement that was told, be it not loaded yet.
        self._told = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Of the last placement whose share was loaded."""
        return self._epoch

    def PreparePlacement(
        self, request: pb.PreparePlacementRequest, context: grpc.ServicerContext
    ) -> pb.PreparePlacementResponse:
        """Load what the balancer placed here, beside what is here."""
        wanted = self._experts(request.layers, context)
        digests, all_known = self._digests(request.layers, context)
        in_order = dict.fromkeys((*request.layer_order, *wanted))
        wanted = {layer: wanted[layer] for layer in in_order if layer in wanted}
        epoch = request.epoch
        # Before the lock: what an older placement is loading is wanted no more.
        self._tell(epoch, context)
        with self._changing:
            self._refuse_older(epoch, context)
            if self._is_limited and not self._epoch:
                # Left of placements that were given up before this server had a share. Nobody asks for it,
                # and nobody counts it where room is reckoned with.
                self._keep(wanted)
            try:
                loaded = self._store.load(wanted, lambda: self._told > epoch, digests)
            except ExpertMismatchError as error:
                self._on_mismatch(error)
                context.set_trailing_metadata(((MISMATCH_KEY, "1"),))
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except CheckpointError as error:
                _log.error("%s", error)
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            if self._told > epoch:
                context.abort(grpc.StatusCode.ABORTED, f"epoch {self._told} is newer than {epoch}")
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
        """Unload what is not of this server's share."""
        kept = self._experts(request.layers, context)
        with self._changing:
            self._tell(request.epoch, context)
            self._epoch = request.epoch
            self._keep(kept)
        _log.info("epoch %d: %d experts are kept", request.epoch, self._store.count)
        self._on_retired(request.epoch)
        return pb.RetirePlacementResponse(experts=self._store.count)

    def _keep(self, kept: Mapping[int, Sequence[int]]) -> None:
        held = self._store.held()
        self._store.unload({layer: {*held[layer]} - {*kept.get(layer, ())} for layer in held})

    def ListExperts(
        self, request: pb.ListExpertsRequest, context: grpc.ServicerContext
    ) -> pb.ListExpertsResponse:
        """What is held, and the newest epoch that was told, be it not loaded."""
        held = self._store.held()
        return pb.ListExpertsResponse(
            epoch=self._told,
            layers=self._holdings(held),
        )

    def _holdings(self, experts: Mapping[int, Sequence[int]]) -> list[common_pb2.Holding]:
        """These experts with their digests, layer by layer."""
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
        """The digests that the balancer knows, and whether it knows all. One that knows of none compares
        none: it is of an older release.
        """
        if not any(holding.digests for holding in layers):
            return {}, True
        if any(len(holding.digests) != len(holding.experts) for holding in layers):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a digest for each expert")
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
        """MoE layer -> logical experts, of a request."""
        if len(layers) != self._shape.num_layers:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(layers)} layers, the model has {self._shape.num_layers}",
            )
        wanted = {layer: list(holding.experts) for layer, holding in enumerate(layers)}
        if any(e >= self._shape.num_experts for experts in wanted.values() for e in experts):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"an expert beyond {self._shape.num_experts - 1}",
            )
        return wanted

    def _tell(self, epoch: int, context: grpc.ServicerContext) -> None:
        """An epoch was told; it is refused if it is older than another that was."""
        with self._telling:
            self._told = max(self._told, epoch)
        self._refuse_older(epoch, context)

    def _refuse_older(self, epoch: int, context: grpc.ServicerContext) -> None:
        if epoch < self._told:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {epoch} is older than {self._told}",
            )

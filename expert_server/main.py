"""The expert server process, from joining the cluster to leaving it."""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.source import Source, is_local
from eaas.config import ExpertServerConfig
from eaas.cores import bind_thread, refuse_other_core, usable_cores
from eaas.errors import (
    CheckpointError,
    ClusterError,
    DeviceFullError,
    DeviceLostError,
    ExpertMismatchError,
)
from eaas.log import get_logger
from eaas.membership.same_checkpoint import refuse_other_checkpoint
from eaas.membership.session import MemberSession, MembershipView, Report
from eaas.net.grpc_client import MESSAGE_BYTES, STREAM_SILENCE_S
from eaas.net.grpc_server import Service, serve
from eaas.net.listen_policy import member_secret
from eaas.net.probes import ProbeServer
from eaas.net.tls import Identity
from eaas.telemetry import Tracing
from eaas.types import Member, MemberState, Role
from eaas.wire import Arena
from eaas.wire.arena import SPIN_US
from eaas.wire.header import slot_sizes
from expert_server.experts.placements import PlacementHandler
from expert_server.experts.store import ExpertStore, naming_expert
from expert_server.kernels import ExpertKernel, Quantization
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.kernels.panels import is_decoded
from expert_server.kernels.quantize import quantization_error
from expert_server.kernels.slot_kernel import SlotKernel
from expert_server.kernels.spec import spec_of
from expert_server.kernels.trial import replica_bytes
from expert_server.leaving import Leaving
from expert_server.load_report.hotness import HotnessHandler
from expert_server.loop.liveness import Watchdog
from expert_server.loop.loop import ServeLoop
from expert_server.loop.tracing import BatchTraces
from expert_server.service import ROLES, SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import SlotTable, last_gone
from expert_server.weights.peers import PeerReader, peer_source, serving_peers
from expert_server.weights.reader import ExpertReader
from expert_server.weights.sharing import CheckpointSharer
from expert_server.weights.url_source import UrlSource

__all__ = ["ExpertServer"]

_log = get_logger(__name__)
_GRACE_S = 1.0
_SHARING = (MemberState.SERVING, MemberState.DRAINING)
# Concurrent calls in addition to the clients' streams.
_CALLS = 32
# Tokens of a slot whose memory a device's driver locks.
_DEVICE_SLOT_TOKENS = 512
# Message size in addition to a slot's payload: shares of placements.
_CONTROL_BYTES = 4 << 20
# How long a thread that runs Python may hold the interpreter while the polling loop waits for it. The loop
# gives the interpreter up four times per answer (waits, products). While experts load, Python's default of
# 5 ms delays an answer by 20 ms; this value delays it by 1 ms and loads as fast.
_SWITCH_S = 1e-4


class ExpertServer:
    """The expert server process: arena, serving loop, gRPC service and cluster membership.

    The loop runs in the thread that calls `run`; all other threads sleep until they have work.

    Args:
        model: Directory or URL of the checkpoint; None: read the weights from the cluster's other servers.
        server_id: Unique in the cluster, kept over restarts.
        monitor_address: host:port.
        config: Threads, device, kernel, slots.
        on_serving: Called once the first placement is loaded, with the gRPC address and a line about the
            kernel.
        tls: This process's certificate; None: plain text.
        tracing: Exports the spans of batches; None: no spans.

    Raises:
        CheckpointError: The checkpoint cannot be served (see its subclasses).
        ConfigError: The configured kernel cannot serve this model on this CPU or GPU, or there is no such
            GPU.
        SharedMemoryError: There is no memory for the arena.
        PortInUseError: The gRPC port is taken.
        ClusterError: The monitor cannot be reached.
    """

    def __init__(
        self,
        model: str | None,
        server_id: str,
        monitor_address: str,
        config: ExpertServerConfig,
        on_serving: Callable[[str, str], None],
        tls: Identity | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        # Without a setting, leave half of the cores to other processes.
        threads = config.threads or max(1, usable_cores() // 2)
        refuse_other_core(config.core)
        self._core = config.core
        torch.set_num_threads(threads)
        sys.setswitchinterval(_SWITCH_S)
        self._server_id = server_id
        self._monitor_address = monitor_address
        self._joined = threading.Event()
        self._peers = (
            [m.address for m in serving_peers(monitor_address, tls)] if model is None else []
        )
        self._has_model = model is not None
        self._source = self._find_source(model, tls)
        with ExitStack() as undo:
            undo.callback(self._source.close)
            checkpoint = Checkpoint.open(self._source)
            self.shape = checkpoint.shape
            self._on_serving = on_serving
            self._state = MemberState.JOINING
            self._state_lock = threading.Lock()
            # Whether a placement with this server is in force and all others are retired.
            self._settled = False
            self._members: Mapping[str, Member] = {}
            # What ends the server, from another thread than that of `run`.
            self._fatal: CheckpointError | ClusterError | DeviceLostError | None = None
            reader = ExpertReader(checkpoint)
            spec = spec_of(reader, threads, config.quantization)
            sizes = ExpertSizes.of(
                checkpoint.expert_modules()[self.shape.layer_names[0]], self.shape.top_k
            )
            self._kernel = choose_kernel(
                reader.forms, spec, sizes, config.kernel, config.device
            ).kernel
            undo.callback(self._kernel.close)
            memory_bytes, size, slot_tokens = config.memory_bytes, 0, config.slot_tokens
            if memory_bytes or isinstance(self._kernel, SlotKernel):
                # Reported before the first placement, so that the balancer places no more than fits.
                size = replica_bytes(self._kernel, reader.forms[0], spec, sizes)
            if isinstance(self._kernel, SlotKernel):
                # Its slots are page-locked whole, and it reads the weights again sooner than a CPU.
                slot_tokens = min(slot_tokens, _DEVICE_SLOT_TOKENS)
                most = config.slots * slot_tokens
                memory_bytes = self._kernel.memory_limit(memory_bytes, most, sizes, size)
            self._about_kernel = _describe(self._kernel, reader)
            slot_bytes = slot_sizes(slot_tokens, self.shape.hidden_size, self.shape.top_k)
            self._arena = Arena.create_shared(
                config.slots,
                *slot_bytes[-1],
                # Distinguishes this arena from that of another process with the same pid and descriptor:
                # a later one, or one in another container.
                secrets.randbits(63),
            )
            undo.callback(self._arena.close)
            # Before it joins: without memory for any client it serves nobody.
            self._arena.allocate(0, 1, *slot_bytes[0])
            if isinstance(self._kernel, SlotKernel):
                self._arena.allocate(0, config.slots, *slot_bytes[-1])
                self._kernel.pin_slots(self._arena.buffer)
            self._table = SlotTable(self._arena)
            self._loop = ServeLoop(
                self._arena,
                self._table,
                self._kernel,
                self.shape,
                SPIN_US,
                config.batching,
                config.batch_window_us * 1e-6,
                config.added_latency_us * 1e-6,
                traces=BatchTraces(tracing, server_id) if tracing else None,
            )
            undo.callback(self._loop.close)
            self._store = ExpertStore(
                reader, self._kernel, config.load_bytes_per_s, self._loop, memory_bytes
            )
            hotness = HotnessHandler(self.shape, self._loop, self._store)
            self._kernel.count_into(hotness.counts_LX)
            placements = PlacementHandler(
                self._store,
                self.shape,
                self._on_prepared,
                self._on_retired,
                bool(memory_bytes),
                self._on_unloadable,
                self._on_lost,
            )
            self._watchdog = Watchdog(self._loop.liveness, self._on_liveness)
            self._service = ExpertService(
                self._arena,
                self._table,
                self.shape,
                placements,
                CheckpointSharer(
                    self._source.directory if isinstance(self._source, LocalSource) else None,
                    config.share_bytes_per_s,
                    self.shape.digest,
                    checkpoint.config_text,
                ),
                hotness,
                self.drain,
                self._living_clients,
            )
            self._server = serve(
                [Service(SERVICE, add_expert_service, self._service, ROLES)],
                config.host,
                config.port,
                # Each client stream occupies one worker, and there are at most as many streams as slots.
                max_workers=config.slots + _CALLS,
                credentials=tls and tls.server_credentials(),
                secret=member_secret(monitor_address, config.host, tls),
                message_bytes=min(_CONTROL_BYTES + self._arena.request_stride, MESSAGE_BYTES),
            )
            undo.callback(self._server.stop, 0)
            self._probes: ProbeServer | None = None
            if config.health_port:
                self._probes = ProbeServer(
                    config.host,
                    config.health_port,
                    lambda: self._server.serving,
                    lambda: not self._watchdog.stalled_s,
                )
                undo.callback(self._probes.close)
            member = Member(
                id=server_id,
                role=Role.EXPERT_SERVER,
                pid=os.getpid(),
                host=socket.gethostname(),
                address=self._server.address,
                state=MemberState.JOINING,
                model=self.shape,
                transports=tuple(self._service.endpoints),
                speed=config.speed,
                memory_bytes=memory_bytes,
                expert_bytes=size if memory_bytes else 0,
                node=config.node or socket.gethostname(),
            )
            self._session = MemberSession(
                monitor_address,
                member,
                report=self._report,
                on_change=self._on_members,
                on_stopping=self._loop.stop,
                on_new_incarnation=self._on_new_incarnation,
                on_replaced=self._on_replaced,
                tls=tls,
            )
            self._leaving = Leaving(
                server_id,
                view=lambda: self._session.view,
                held=lambda: self._store.count,
                in_flight=lambda: self._loop.in_flight,
                begin=self._begin_leaving,
                end=self._loop.stop,
                timeout_s=config.drain_timeout_s,
            )
            undo.pop_all()
        self._joined.set()

    def run(self) -> None:
        """Run the serving loop until `stop`, then leave the cluster.

        Raises:
            CheckpointError: An expert cannot be loaded, or differs from those of the cluster's other servers,
                and this server never served.
            ClusterError: The cluster serves another checkpoint.
            DeviceLostError: Its GPU has failed.
        """
        self._watchdog.start()
        try:
            # Only this thread: the kernel's other threads exist already.
            if self._core >= 0:
                bind_thread(self._core)
            self._loop.run()
        finally:
            self._watchdog.close()
            self._server.set_serving(False)
            self._session.close(deregister=True)
            if self._probes is not None:
                self._probes.close()
            # Clients see at once that their slots are revoked. The streams must end before the arena does.
            self._table.revoke_all()
            self._service.close()
            self._server.stop(_GRACE_S)
            self._source.close()
            try:
                # Before the memory that it may have page-locked.
                self._kernel.close()
            finally:
                self._arena.close()
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """Make `run` return without handing experts over, unlike `drain`. Any thread or signal handler."""
        self._loop.stop()

    def drain(self) -> None:
        """Start to hand the experts over to other servers, then end `run`. Returns at once; idempotent.

        Called by the first SIGTERM or SIGINT, and by the balancer's Drain call.
        """
        self._joined.wait()
        self._leaving.start()

    def _find_source(self, model: str | None, tls: Identity | None) -> Source:
        if model is None:
            return peer_source(PeerReader(self._peer_addresses, tls), self._peers)
        return LocalSource(model) if is_local(model) else UrlSource(model)

    def _peer_addresses(self) -> list[str]:
        """Addresses of servers to read weights from, for a server without a checkpoint; in random order."""
        known = self._peers
        if self._joined.is_set():
            others = self._session.view.live(Role.EXPERT_SERVER)
            serving = [m for m in others if m.state in _SHARING and m.id != self._server_id]
            known = [m.address for m in serving]
        return random.sample(known, len(known))

    def _begin_leaving(self) -> None:
        with self._state_lock:
            self._state = MemberState.DRAINING
        self._session.report_now()

    def _report(self) -> Report:
        loading_bytes, loaded_bytes = self._store.loading
        return Report(
            state=self._state,
            progress=self._loop.requests,
            in_flight=self._loop.in_flight,
            experts=self._store.count,
            epoch=self._loop.epoch,
            stalled_s=self._watchdog.stalled_s,
            busy_s=self._loop.busy_s,
            loading_bytes=loading_bytes,
            loaded_bytes=loaded_bytes,
        )

    def _on_liveness(self) -> None:
        """For the watchdog: report to health service and monitor that the loop has stalled or moves again."""
        with self._state_lock:
            self._server.set_serving(self._settled and not self._watchdog.stalled_s)
        self._session.report_now()

    def _on_prepared(self, epoch: int) -> None:
        with self._state_lock:
            self._loop.epoch = epoch
            first = self._state is MemberState.JOINING
            if first:
                self._state = MemberState.SERVING
        # Later changes wait for the next heartbeat, because the balancer already has them and a report
        # wakes all members.
        if first:
            self._joined.wait()
            self._session.report_now()
            self._on_serving(self._server.address, self._about_kernel)

    def _on_retired(self, epoch: int) -> None:
        """On the end of a roll-out. The first makes this server ready.

        Then a server that drains has handed over its experts, and the next one may leave.
        """
        with self._state_lock:
            self._loop.epoch = epoch
            if not self._settled:
                self._settled = True
                self._server.set_serving(not self._watchdog.stalled_s)

    def _on_unloadable(self, error: CheckpointError) -> None:
        """Handle an expert that cannot be loaded: keep serving the others; if none is served, stop.

        Other servers may lack the experts that match. Peers may send again what a server without a checkpoint
        lacks, but not experts that differ from the cluster's, and no memory.
        """
        is_final = self._has_model or isinstance(error, ExpertMismatchError | DeviceFullError)
        with self._state_lock:
            serves = self._state is not MemberState.JOINING
        if serves or not is_final:
            _log.error("%s", error)
        else:
            self._fatal = error
            self._loop.stop()

    def _on_lost(self, error: DeviceLostError) -> None:
        """Stop, because the kernel's device failed in a load, so that replicas answer."""
        self._fatal = error
        self._loop.stop()

    def _on_members(self, view: MembershipView) -> None:
        """Handle a new view of members.

        Free the slots of clients that are DEAD, have LEFT or were replaced. End a server that has another
        checkpoint than the cluster: the balancer never gives it experts.
        """
        if self._state is MemberState.JOINING:
            try:
                refuse_other_checkpoint(view.members.values(), self.shape, self._monitor_address)
            except ClusterError as error:
                self._fatal = ClusterError(f"{self._source}: {error}")
                self._loop.stop()
        former, self._members = self._members, view.members
        for client_id in self._table.clients():
            member = view.members.get(client_id)
            if member is not None and self._table.revoke_incarnations(
                client_id, last_gone(former.get(client_id), member)
            ):
                _log.info("%s is gone: its slots are free", client_id)

    def _living_clients(self) -> dict[str, int] | None:
        """Incarnations of the live clients, by id; None if the monitor is silent or the join is not done.

        When slots run out, Connect frees those of clients that are not among these.
        """
        if not self._joined.is_set():
            return None
        view = self._session.view
        if view.age_s(time.monotonic()) > STREAM_SILENCE_S:
            return None
        return {m.id: m.incarnation for m in view.live(Role.ATTENTION_CLIENT)}

    def _on_new_incarnation(self, incarnation: int) -> None:
        """Revoke all slots, because the lease lapsed while this process was suspended."""
        _log.warning("lease lapsed; continuing as incarnation %d", incarnation)
        self._table.revoke_all()

    def _on_replaced(self) -> None:
        """Revoke all slots, because another process runs under this id; the session waits for the id."""
        self._table.revoke_all()


def _describe(kernel: ExpertKernel, reader: ExpertReader) -> str:
    """Describe the kernel in one line for the start message, with the error that quantisation causes.

    The error is the larger of two experts' (the first layer's first, the last layer's first), so every
    server of a cluster reports the same one.

    Raises:
        CheckpointError: An expert cannot be read, or its weights cannot be quantised.
    """
    dtype = str(kernel.spec.dtype).removeprefix("torch.")
    if kernel.spec.dtype != reader.dtype:
        dtype += f" for {str(reader.dtype).removeprefix('torch.')}"
    line = f"{kernel.name} ({', '.join(filter(None, (dtype, kernel.isa)))})"
    if kernel.spec.stored is not None:
        how = "as stored" if is_decoded(kernel.spec.stored.format) else "converted on loading"
        return f"{line}; weights {how}: {kernel.spec.stored}"
    quantization = kernel.spec.quantization
    if quantization is Quantization.NONE:
        return line
    errors = []
    for layer in (0, len(reader.forms) - 1):
        for expert, weights in reader.read(layer, [0]):
            with naming_expert(layer, expert):
                errors.append(quantization_error(weights, reader.forms[layer], quantization))
    reader.release()
    return f"{line}; {quantization} weights: relative error {100 * max(errors):.2g} %"

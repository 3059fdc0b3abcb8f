"""Entry point of the attention client process: model, cluster membership, engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, start_http_server

from attention_client.cluster import Cluster
from attention_client.engines.transformers.compiled.compiler import PassCompiler
from attention_client.engines.transformers.loading import load_onto
from attention_client.engines.transformers.model import serving_dtype
from attention_client.generation.engine_choice import build_engine
from attention_client.generation.live_admission import LiveAdmission
from attention_client.generation.scheduler_metrics import SchedulerMetrics
from attention_client.generation.service import EngineService
from attention_client.generation.sizes import EngineSizes
from attention_client.scheduler import strategy
from attention_client.status import min_nodes, min_replicas
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.server_metrics import ServerMetrics
from attention_client.telemetry.tracing import LayerTraces
from eaas import __version__
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.client_digest import client_digest
from eaas.checkpoint.tokenizer import end_tokens, load_tokenizer
from eaas.config import AttentionClientConfig
from eaas.cores import usable_cores
from eaas.generation.matchers import Matchers
from eaas.heap import share_heaps
from eaas.log import get_logger
from eaas.net import server_records
from eaas.net.grpc_server import host_to_tell, join_host_port
from eaas.net.listen import bind
from eaas.net.listen_policy import member_secret
from eaas.net.probes import ProbeServer
from eaas.net.tls import Identity
from eaas.telemetry import Tracing

__all__ = ["run"]

_log = get_logger(__name__)
_COVERED_S = 600.0
_WAIT_STEP_S = 0.5


def run(
    model_path: Path,
    client_id: str,
    monitor_address: str,
    config: AttentionClientConfig,
    stopping: threading.Event,
    leaving: threading.Event,
    on_serving: Callable[[str], None],
    tls: Identity | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Load the model and generate tokens for frontends until `leaving` or `stopping` is set.

    Args:
        model_path: Directory of the checkpoint.
        client_id: Unique in the cluster.
        monitor_address: host:port.
        config: Engine, transport, timeouts.
        stopping: Ends the call at once. A second signal sets it, or the operator who stops the cluster.
        leaving: Ends the call once no frontend has a request here. The first signal sets it.
        on_serving: Called with the engine's host:port once it serves.
        tls: Identity of this process; None: plain text.
        tracing: Exports spans of layer calls; None: no tracing. Closed at the end.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ConfigError: The scheduling strategy is unknown, or the key-value cache does not fit into memory.
        PortInUseError: A port is taken.
        ClusterError: The monitor cannot be reached, or no placement covers every expert.
    """
    share_heaps()
    # Refuse an unknown strategy name before anything is loaded.
    strategy(config.scheduler.strategy)
    torch.set_num_threads(config.threads or max(1, usable_cores() // 2))
    checkpoint = Checkpoint.open(model_path)
    tokenizer = load_tokenizer(model_path)
    registry = CollectorRegistry()
    metrics = ClientMetrics(registry)
    traces = LayerTraces(tracing) if tracing is not None else None
    with ExitStack() as stack:
        if tracing is not None:
            stack.callback(tracing.close)
        listener = stack.enter_context(bind(config.engine_host, config.engine_port))
        address = join_host_port(host_to_tell(config.engine_host), listener.getsockname()[1])
        secret = member_secret(monitor_address, config.engine_host, tls)
        if secret is None:
            server_records.withdraw(address)
        else:
            server_records.publish(address, secret)
        cluster = Cluster(
            monitor_address,
            checkpoint.shape,
            config,
            metrics,
            client_id=client_id,
            address=address,
            engine_address=address,
            on_stopping=stopping.set,
            tls=tls,
            traces=traces,
        )
        stack.callback(cluster.close)
        _watch(cluster, metrics)
        if config.metrics_port:
            server, _ = start_http_server(config.metrics_port, config.engine_host, registry)
            stack.callback(server.shutdown)
        model = load_onto(checkpoint, cluster, dtype=_dtype_of(checkpoint))
        cluster.wait_until_covered(_COVERED_S, stopping)
        if stopping.is_set():
            return
        compiler = None
        # A compiled pass cannot be interrupted for another micro-batch.
        if config.compile and config.overlap != "on":
            compiler = PassCompiler(checkpoint, torch.get_num_threads())
            stack.callback(compiler.close)
        vocabulary = model.config.get_text_config().vocab_size
        # Before the engine is made: the sequential one clears the model's own generation settings.
        ends = end_tokens(model.generation_config, tokenizer, vocabulary)
        admission = LiveAdmission(config.scheduler, model, SchedulerMetrics(registry))
        engine = build_engine(model, _sizes(config), admission, cluster.attribution, compiler)
        if traces is not None:
            traces.watch(engine.traced)
        service = EngineService(
            engine,
            client_digest(model_path),
            (checkpoint.shape.digest, __version__),
            partial(Matchers, tokenizer, vocabulary, ends),
            listener,
            tls,
            secret,
            cluster.missing,
            partial(_failovers, metrics),
        )
        if config.health_port:
            probes = ProbeServer(
                config.engine_host,
                config.health_port,
                lambda: not cluster.missing(),
                lambda: engine.failure() is None,
            )
            stack.callback(probes.close)
        service.start()
        # Idempotent: after a drain no request is left.
        stack.callback(service.stop)
        cluster.serving()
        on_serving(address)
        # Wait in steps, because a signal handled by another thread does not wake this one.
        while not stopping.wait(_WAIT_STEP_S):
            if leaving.is_set():
                _drain(cluster, service, config.drain_timeout_s, stopping)
                break


def _watch(cluster: Cluster, metrics: ClientMetrics) -> None:
    metrics.watch_coverage(
        lambda: len(cluster.uncovered()),
        lambda: min_replicas(cluster),
        lambda: min_nodes(cluster),
        cluster.num_nodes,
    )
    metrics.registry.register(
        ServerMetrics(
            cluster.session.ask_members,
            lambda: cluster.session.view.members,
            lambda: cluster.placement.servers if cluster.placement else (),
        )
    )


def _sizes(config: AttentionClientConfig) -> EngineSizes:
    return EngineSizes(
        num_blocks=config.cache_blocks or None,
        max_batch_tokens=config.max_batch_tokens,
        token_target_s=config.inter_token_target_ms / 1000,
        # More than torch has: the servers wait for the client, so their cores are free.
        attention_threads=config.threads or usable_cores(),
    )


def _failovers(metrics: ClientMetrics) -> Mapping[str, int]:
    (family,) = metrics.failovers.collect()
    return {
        sample.labels["reason"]: int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _drain(
    cluster: Cluster, service: EngineService, most_s: float, stopping: threading.Event
) -> None:
    """Let frontends move their requests, and wait for those that no other engine can go on with."""
    cluster.draining()
    service.drain()
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline and not stopping.wait(_WAIT_STEP_S / 10):
        if not service.is_busy():
            return


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    dtype, stored = serving_dtype(checkpoint), checkpoint.shape.dtype
    if dtype is not getattr(torch, stored):
        _log.info(
            "weights in %s are computed in %s, which holds all their values; with "
            '"dtype": "bfloat16" in config.json they take half the memory',
            *(stored, str(dtype).removeprefix("torch.")),
        )
    return dtype

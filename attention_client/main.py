"""Entry point of the attention client process: model, cluster membership, HTTP endpoint."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, generate_latest
from transformers import AutoTokenizer

from attention_client.cluster import Cluster
from attention_client.engines.transformers.compiled.compiler import PassCompiler
from attention_client.engines.transformers.loading import load_onto
from attention_client.engines.transformers.model import serving_dtype
from attention_client.generation.sizes import EngineSizes
from attention_client.heap import share_heaps
from attention_client.scheduler import strategy
from attention_client.serving.access import Access
from attention_client.serving.app import build_app
from attention_client.serving.dashboard.build import build_dashboard
from attention_client.serving.dashboard.mount import Dashboard
from attention_client.serving.limits import ServeLimits
from attention_client.serving.network.server import HttpServer, bind
from attention_client.status import cluster_status, min_nodes, min_replicas
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.server_metrics import ServerMetrics
from attention_client.telemetry.tracing import RequestTraces
from eaas.checkpoint import Checkpoint
from eaas.cluster_snapshot.counters import COUNTED, Counters, read_counters
from eaas.config import AttentionClientConfig
from eaas.cores import usable_cores
from eaas.errors import NotACheckpointError
from eaas.log import get_logger, one_line
from eaas.net.api_keys import ApiKeys
from eaas.net.grpc_server import host_to_tell, join_host_port
from eaas.net.listen_policy import only_here
from eaas.net.tls import Identity
from eaas.telemetry import Tracing
from eaas.types import Member

__all__ = ["run"]

_log = get_logger(__name__)
_COVERED_S = 600.0
_WAIT_STEP_S = 0.5
_GRACE_S = 1.0


def run(
    model_path: Path,
    client_id: str,
    monitor_address: str,
    config: AttentionClientConfig,
    stopping: threading.Event,
    leaving: threading.Event,
    on_serving: Callable[[str], None],
    tls: Identity | None = None,
    keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Load the model and serve it over HTTP until `leaving` or `stopping` is set.

    Args:
        model_path: Directory of the checkpoint.
        client_id: Unique in the cluster.
        monitor_address: host:port.
        config: Endpoint, transport, timeouts.
        stopping: Ends the call at once. A second signal sets it, or the operator who stops the cluster.
        leaving: Ends the call once running requests have ended. The first signal sets it.
        on_serving: Called with the endpoint's URL once it answers requests.
        tls: Identity of this process; None: plain text.
        keys: API keys, one of which each request must present; None: no key is needed.
        tracing: Exports spans of requests; None: no tracing. Closed at the end.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ConfigError: The scheduling strategy is unknown.
        PortInUseError: The endpoint's port is taken.
        ClusterError: The monitor cannot be reached, or no placement covers every expert.
    """
    share_heaps()
    # Refuse an unknown strategy name before anything is loaded.
    strategy(config.scheduler.strategy)
    torch.set_num_threads(config.threads or max(1, usable_cores() // 2))
    checkpoint = Checkpoint.open(model_path)
    tokenizer = _load_tokenizer(model_path)
    registry = CollectorRegistry()
    metrics = ClientMetrics(registry)
    traces = RequestTraces(tracing) if tracing is not None else None
    with ExitStack() as stack:
        if tracing is not None:
            stack.callback(tracing.close)
        listener = stack.enter_context(bind(config.host, config.port))
        host_port = join_host_port(host_to_tell(config.host), listener.getsockname()[1])
        cluster = Cluster(
            monitor_address,
            checkpoint.shape,
            config,
            metrics,
            client_id=client_id,
            address=host_port,
            on_stopping=stopping.set,
            tls=tls,
            traces=traces,
        )
        stack.callback(cluster.close)
        metrics.watch_coverage(
            lambda: len(cluster.uncovered()),
            lambda: min_replicas(cluster),
            lambda: min_nodes(cluster),
            cluster.num_nodes,
        )
        registry.register(
            ServerMetrics(
                cluster.session.ask_members,
                lambda: cluster.session.view.members,
                lambda: cluster.placement.servers if cluster.placement else (),
            )
        )
        model = load_onto(checkpoint, cluster, dtype=_dtype_of(checkpoint))
        cluster.wait_until_covered(_COVERED_S, stopping)
        if stopping.is_set():
            return
        url = f"http://{host_port}"
        sizes = EngineSizes(
            num_blocks=config.cache_blocks or None,
            max_batch_tokens=config.max_batch_tokens,
            token_target_s=config.inter_token_target_ms / 1000,
            # More than torch has: the servers wait for the client, so their cores are free.
            attention_threads=config.threads or usable_cores(),
        )
        limits = ServeLimits(max_stored_responses=config.stored_responses)
        compiler = None
        # A compiled pass cannot be interrupted for another micro-batch.
        if config.compile and config.overlap != "on":
            compiler = PassCompiler(checkpoint, torch.get_num_threads())
            stack.callback(compiler.close)
        name, *others = config.model_names(model_path)
        # Without names of its own, a model may also be asked for by its path.
        aliases, unlisted = (others, []) if config.served_model_name else ([], others)
        app = build_app(
            model,
            tokenizer,
            names=[name, *aliases],
            unlisted=unlisted,
            status=lambda: cluster_status(cluster, url) | {"tls": tls is not None},
            healthy=lambda: _healthy(cluster),
            sizes=sizes,
            limits=limits,
            access=Access(keys, _hosts(config)),
            scheduling=config.scheduler,
            registry=registry,
            origins=config.allowed_origins,
            traces=traces,
            attribution=cluster.attribution,
            dashboard=_dashboard(cluster, config, registry, tls, keys, listener),
            compiler=compiler,
            response_template=config.response_template or None,
        )
        server = HttpServer(app, listener, limits)
        server.start()
        # Idempotent: after a drain no request is left.
        stack.callback(server.stop, _GRACE_S)
        cluster.serving()
        on_serving(url)
        # Wait in steps, because a signal handled by another thread does not wake this one.
        while not stopping.wait(_WAIT_STEP_S):
            if leaving.is_set():
                server.stop(config.drain_timeout_s, stopping)
                break


def _hosts(config: AttentionClientConfig) -> tuple[str, ...] | None:
    """Return the HTTP Host names to accept; None (any) beyond loopback, where its names are unknown."""
    if not only_here(config.host):
        return None
    return config.host, *config.allowed_hosts


def _dashboard(
    cluster: Cluster,
    config: AttentionClientConfig,
    registry: CollectorRegistry,
    tls: Identity | None,
    keys: ApiKeys | None,
    listener: socket.socket,
) -> Dashboard | None:
    if not config.dashboard:
        return None

    def members(timeout_s: float) -> list[Member] | None:
        found = cluster.session.ask_members(timeout_s)
        return None if found is None else list(found.values())

    def counters(_timeout_s: float) -> Counters:
        # Leave out the metrics that would ask the monitor.
        return read_counters(generate_latest(registry.restricted_registry(COUNTED)).decode())

    host, port = listener.getsockname()[:2]
    return build_dashboard(
        cluster.monitor_address,
        host,
        port,
        members,
        counters,
        tls,
        keys,
        operator_page=config.operator_page,
    )


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    dtype, stored = serving_dtype(checkpoint), checkpoint.shape.dtype
    if dtype is not getattr(torch, stored):
        _log.info(
            "weights in %s are computed in %s, which holds all their values; with "
            '"dtype": "bfloat16" in config.json they take half the memory',
            *(stored, str(dtype).removeprefix("torch.")),
        )
    return dtype


def _healthy(cluster: Cluster) -> tuple[bool, str]:
    missing = cluster.missing()
    return not missing, missing


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # `tokenizers` raises no other class
        raise NotACheckpointError(
            f"{path}: the files of the tokenizer cannot be used ({type(error).__name__}: "
            f"{one_line(error)}): download tokenizer.json and tokenizer_config.json again"
        ) from error
    # If all files are missing, transformers makes an empty tokenizer.
    if not any((path / name).is_file() for name in tokenizer.vocab_files_names.values()):
        raise NotACheckpointError(
            f"{path}: the tokenizer cannot be loaded; add tokenizer.json (there is no vocabulary)"
        )
    return tokenizer

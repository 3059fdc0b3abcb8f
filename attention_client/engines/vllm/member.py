"""A vLLM worker process as a member of the cluster: an attention client."""

from __future__ import annotations

import multiprocessing.util
import os
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.engines.vllm.lifeline import stop_engine
from attention_client.engines.vllm.logs import log_with_vllm
from attention_client.engines.vllm.settings import EngineSettings
from attention_client.engines.vllm.worker_page import serve_page
from attention_client.status import min_nodes, min_replicas
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.server_metrics import ServerMetrics
from eaas.cores import threads_on_any_core
from eaas.errors import ClusterError
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.types import ModelShape, Role

__all__ = ["join"]

_log = get_logger(__name__)
# Interval of the progress lines while the servers load their experts.
_PROGRESS_S = 5.0


def join(settings: EngineSettings, shape: ModelShape, rank: int) -> Cluster:
    """Join the cluster as an attention client, and wait until every expert has a live replica.

    The process leaves the cluster when it ends in order, and vLLM ends when the operator stops the cluster.

    Args:
        settings: Section `eaas`.
        shape: The model of this process.
        rank: Number of this worker among all workers of this vLLM; part of the member's id.

    Raises:
        ClusterError: The monitor does not answer, the servers serve another checkpoint, or an expert has no
            replica after `cover_s`.
        ConfigError: The transport is not installed, or the certificates cannot be used.
    """
    log_with_vllm()
    name = settings.id or f"vllm-{os.uname().nodename}-{os.getppid()}"
    metrics = ClientMetrics(CollectorRegistry())
    tls_dir = settings.tls_dir
    tls = Identity(Path(tls_dir), Role.ATTENTION_CLIENT.value) if tls_dir else None
    with threads_on_any_core():
        cluster = Cluster(
            settings.monitor,
            shape,
            settings.client,
            metrics,
            client_id=f"{name}-{rank}" if rank else name,
            address=settings.endpoint,
            on_stopping=stop_engine,
            tls=tls,
        )
    # vLLM's processes are children of `multiprocessing`, which runs these functions where it skips `atexit`.
    multiprocessing.util.Finalize(None, cluster.close, exitpriority=100)
    try:
        _wait_until_covered(cluster, settings.cover_s)
    except BaseException:
        cluster.close()
        raise
    cluster.serving()
    _serve_metrics(cluster, metrics, rank)
    _log.info("joined the cluster of %s as %s", settings.monitor, cluster.client_id)
    return cluster


def _serve_metrics(cluster: Cluster, metrics: ClientMetrics, rank: int) -> None:
    metrics.watch_coverage(
        lambda: len(cluster.uncovered()),
        lambda: min_replicas(cluster),
        lambda: min_nodes(cluster),
        cluster.num_nodes,
    )
    if rank == 0:
        # Every client knows the same about the servers.
        metrics.registry.register(
            ServerMetrics(
                cluster.session.ask_members,
                lambda: cluster.session.view.members,
                lambda: cluster.placement.servers if cluster.placement else (),
            )
        )
    serve_page(metrics.registry)


def _wait_until_covered(cluster: Cluster, timeout_s: float) -> None:
    """Wait as `Cluster.wait_until_covered`, and log what is missing every few seconds."""
    started, ready = time.monotonic(), threading.Event()

    def report() -> None:
        while not ready.wait(_PROGRESS_S):
            waited_s = time.monotonic() - started
            _log.info("waiting for expert servers for %.0f s: %s", waited_s, cluster.missing())

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        cluster.wait_until_covered(timeout_s)
    except ClusterError as error:
        raise ClusterError(
            f"{error}; start expert servers, or give the section a longer cover_s"
        ) from None
    finally:
        ready.set()
        reporter.join()

"""Entry point of the frontend process: the HTTP endpoint in front of the cluster's engines."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from eaas.checkpoint.client_digest import client_digest
from eaas.cluster_snapshot.counters import COUNTED, Counters, read_counters
from eaas.membership.session import MembershipView
from eaas.telemetry import Tracing
from eaas.types import Role
from frontend.app import build_app
from frontend.defaults import ModelFiles
from frontend.engines.links import Engines
from frontend.limits import ServeLimits
from frontend.metrics import EngineMetrics
from frontend.process import FrontendProcess
from frontend.tracing import RequestTraces

__all__ = ["run"]


def run(process: FrontendProcess, model_path: Path, tracing: Tracing | None = None) -> None:
    """Serve a model over HTTP until a signal; the cluster's engines run it.

    Args:
        process: The process. It serves once an engine is connected.
        model_path: Directory of the checkpoint, of which the weights are not read.
        tracing: Exports spans of requests; None: no tracing. Closed at the end.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        PortInUseError: The endpoint's port is taken.
        ClusterError: The monitor cannot be reached.
    """
    # transformers warns about each request and about settings that are intended.
    logging.getLogger("transformers.generation").setLevel(logging.ERROR)
    config, tls = process.config, process.tls
    files = ModelFiles.load(model_path)
    registry = CollectorRegistry()

    def counters(_timeout_s: float) -> Counters:
        return read_counters(generate_latest(registry.restricted_registry(COUNTED)).decode())

    traces = RequestTraces(tracing)
    metrics = EngineMetrics(registry, traces)
    digest = client_digest(model_path)
    engines = Engines(process.id, digest, tls, metrics.moved, metrics.paused)
    metrics.failovers = engines.failovers
    name, *others = config.model_names(model_path)
    # Without names of its own, a model may also be asked for by its path.
    aliases, unlisted = (others, []) if config.served_model_name else ([], others)
    limits = ServeLimits(max_stored_responses=config.stored_responses)
    build = partial(
        build_app,
        engines,
        files,
        names=[name, *aliases],
        unlisted=unlisted,
        healthy=engines.health,
        limits=limits,
        access=process.access,
        registry=registry,
        origins=config.allowed_origins,
        traces=traces,
        response_template=config.response_template or None,
    )
    try:
        process.serve(
            build,
            limits,
            counters=counters,
            follow=lambda view: engines.follow(_engines_of(view)),
            is_ready=lambda: engines.health()[0],
            requests=lambda: engines.requests,
            registry=registry,
        )
    finally:
        if tracing is not None:
            tracing.close()


def _engines_of(view: MembershipView) -> dict[str, str]:
    """Return the address of each attention client's engine by its name; empty if it has none."""
    return {
        f"{member.id}@{member.incarnation}": member.engine_address
        for member in view.live(Role.ATTENTION_CLIENT)
    }

"""`eaas up --on ray` and the end of such a cluster."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.counted import counted
from eaas.errors import ClusterError, ConfigError
from eaas.log import print_line
from eaas.net.listen_policy import guarded_keys
from eaas_cli.commands.greeting import greet
from eaas_cli.local.arguments import refuse_few_servers
from eaas_cli.local.loading import loading_shown
from eaas_cli.local.memory import MemoryNeed, memory_need
from eaas_cli.local.restart import role_environment
from eaas_cli.local.running_clusters import forget_on_ray, record_on_ray

if TYPE_CHECKING:
    from eaas.config import ClusterConfig
    from eaas_cli.local.interrupt import Interrupt
    from eaas_cli.ray.cluster import ClusterSpec, RayCluster
    from eaas_cli.ray.placement import Node

__all__ = ["down_on_ray", "reserved", "up_on_ray"]

# Processes start slower than on one machine, since each imports torch.
_START_S = 300.0
_CONTROLLER_S = 60.0
# Above those of Ray's workers, and below those that systems choose for outgoing connections.
_MONITOR_PORTS = range(20_000, 32_000)
# Memory of a role's process without weights, bytes.
_PROCESS_BYTES = 500 << 20
# Room for buffers, as a part of the weights.
_HEADROOM = 1.15
_ROLES = ("monitor", "balancer", "expert-server", "attention-client", "frontend", "vllm")


def up_on_ray(
    model: Path,
    servers: int,
    redundancy: int,
    clients: int,
    engine: str,
    settings: ClusterConfig,
    config_file: Path | None,
    interrupt: Interrupt,
) -> None:
    """Start a cluster on Ray, and return once it serves. A failed start leaves nothing behind.

    Raises:
        ConfigError: Ray is not installed; fewer servers than the redundancy; several nodes without TLS; a
            device with a number.
        ClusterError: No Ray cluster answers, it has a cluster of this project already, or a role failed.
        CheckpointError: The files of the model cannot be served.
        Interrupted: A signal came.
    """
    _refuse_numbered_device(settings)
    from eaas.checkpoint import precheck
    from eaas_cli.ray.connection import connected

    refuse_few_servers(servers, redundancy)
    files = precheck(model, tokenizer=True)
    need = memory_need(files, redundancy, clients, settings.expert_server.quantization)
    started = time.monotonic()
    with connected():
        from eaas_cli.ray.actors import ControllerActor, ray_cluster
        from eaas_cli.ray.cluster import CONTROLLER
        from eaas_cli.ray.placement import actor_options

        spec, nodes = _spec(
            model.resolve(), servers, redundancy, clients, engine, settings, config_file, need
        )
        cluster = ray_cluster(spec)
        cluster.pool.adopt()
        if cluster.pool.actors:
            raise ClusterError("this Ray cluster runs a cluster already: end it with `eaas down`")
        print_line(
            f"starting {counted(servers, 'expert server')} and {counted(clients, 'attention client')} "
            f"for {model} ({need}) on {counted(len(nodes), 'node')} of Ray ..."
        )
        with loading_shown(cluster) as show:
            cluster.start(settings.balancer.apply_timeout_s + _START_S, interrupt, show)
        try:
            head = [spec.candidates[0].node_id]
            options = actor_options(spec.resources["control"], head)
            cluster.pool.create(CONTROLLER, ControllerActor, cluster.spec, options)
            cluster.pool.poll(_CONTROLLER_S)
            _print_summary(cluster, nodes, time.monotonic() - started)
            tls_dir = settings.security.tls_dir
            name = settings.frontend.model_names(cluster.model)[0]
            record_on_ray(cluster.endpoint, str(Path(tls_dir).resolve()) if tls_dir else "", name)
        except BaseException:
            cluster.stop()
            raise


def down_on_ray() -> None:
    """End the cluster on the connected Ray cluster.

    Raises ClusterError: there is none.
    """
    from eaas_cli.ray.connection import connected

    with connected():
        from eaas_cli.ray.cluster import stop_all_roles
        from eaas_cli.ray.pool import ActorPool

        pool = ActorPool()
        pool.adopt()
        if not pool.actors:
            forget_on_ray()
            raise ClusterError("this Ray cluster runs no cluster of `eaas up --on ray`")
        stop_all_roles(pool)
    forget_on_ray()


def _spec(
    model: Path,
    servers: int,
    redundancy: int,
    clients: int,
    engine: str,
    settings: ClusterConfig,
    config_file: Path | None,
    need: MemoryNeed,
) -> tuple[ClusterSpec, list[Node]]:
    """Describe the cluster; also return the live nodes of the connected Ray cluster."""
    import ray

    from eaas_cli.ray.cluster import ClusterSpec
    from eaas_cli.ray.placement import live_nodes, monitor_candidates, refuse_open_network

    security = settings.security
    nodes = live_nodes(ray.nodes())
    loopback = refuse_open_network(nodes, bool(security.tls_dir), security.insecure)
    frontend = settings.frontend
    if not loopback:
        host = frontend.host if "host" in frontend.model_fields_set else nodes[0].address
        guarded_keys(security, host, frontend.api_key_file)
    if frontend.api_key_file:
        path = str(Path(frontend.api_key_file).resolve())
        frontend = frontend.model_copy(update={"api_key_file": path})
        settings = settings.model_copy(update={"frontend": frontend})
    flags = ("--tls", str(Path(security.tls_dir).resolve())) if security.tls_dir else ()
    home = ray.get_runtime_context().get_node_id()
    spec = ClusterSpec(
        model=model,
        servers=servers,
        redundancy=redundancy,
        clients=clients,
        engine=engine,
        config=settings,
        config_text=config_file.read_text() if config_file else None,
        flags=(*flags, *(("--insecure",) if security.insecure else ())),
        environment={role: role_environment(role) for role in _ROLES},
        resources=reserved(settings, need, servers),
        loopback=loopback,
        home=home,
        candidates=tuple(monitor_candidates(nodes, home)),
        # Known from the start, because Ray restarts an actor on another node with the same arguments.
        monitor_port=settings.monitor.port or random.choice(_MONITOR_PORTS),
    )
    return spec, nodes


def _refuse_numbered_device(settings: ClusterConfig) -> None:
    """Raise ConfigError if the settings name one GPU of several: each server sees one, as cuda:0."""
    device = settings.expert_server.device
    if device.startswith("cuda:"):
        raise ConfigError(
            f"expert_server.device {device}: Ray chooses each server's GPU: give cuda"
        )


def reserved(
    settings: ClusterConfig, need: MemoryNeed, servers: int
) -> dict[str, Mapping[str, float]]:
    """Choose what each kind of actor reserves: memory for its weights, and what the settings name."""
    share = need.experts * need.replicas / servers
    wanted = settings.ray
    server = {"memory": share * _HEADROOM + _PROCESS_BYTES}
    if settings.expert_server.device != "cpu":
        # Ray makes this GPU the only one that the process sees.
        server = {"memory": float(_PROCESS_BYTES), "GPU": 1.0}
    return {
        "expert_server": server | wanted.expert_server,
        "attention_client": {"memory": need.others * _HEADROOM + _PROCESS_BYTES}
        | wanted.attention_client,
        "control": {} | wanted.control,
    }


def _print_summary(cluster: RayCluster, nodes: list[Node], took_s: float) -> None:
    print_line(f"SERVING after {took_s:.1f} s")
    reports = {name: actor.report for name, actor in sorted(cluster.pool.actors.items())}
    for name, report in reports.items():
        if report is not None:
            print_line(f"{name}: node {report.ip}, pid {report.pid}")
    nice = {report.ip: report.niceness for report in reports.values() if report is not None}
    for ip, niceness in nice.items():
        if niceness > 0:
            print_line(
                f"note: processes on {ip} run at niceness {niceness}: set RAY_worker_niceness=0 before "
                "`ray start` there"
            )
    if len(nodes) > 1:
        print_line("note: this cluster ends with Ray's head unless Ray keeps its state in Redis")
    kernels = {name: report.kernel for name, report in reports.items() if report is not None}
    greet(
        cluster,
        kernels,
        "",
        "in Ray's log directory of each node (`ray logs`)",
        "`eaas scale 4`, or kill -9 an expert server on its node. `eaas down` ends the cluster.",
    )

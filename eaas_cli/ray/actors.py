"""Ray actors: one for the process of each role, one that controls them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import ray

from eaas.log import configure_logging, get_logger
from eaas_cli.ray.cluster import ClusterSpec, RayCluster
from eaas_cli.ray.controller import Controller
from eaas_cli.ray.placement import live_nodes
from eaas_cli.ray.pool import ActorPool
from eaas_cli.ray.role import RoleProcess, RoleSpec

__all__ = ["ControllerActor", "RoleActor", "ray_cluster"]

_log = get_logger(__name__)
# Ray starts an actor again at once.
_BACKOFF_S = 2.0


def _session_dir() -> Path | None:
    """Ray's directory on this node, from the file of this worker's output; None if that is elsewhere."""
    logs = Path(os.readlink("/proc/self/fd/1")).parent
    return logs.parent if logs.name == "logs" else None


class RoleActor(RoleProcess):
    """Keeps one role's process running on its node."""

    def __init__(self, spec: RoleSpec) -> None:
        configure_logging(spec.name)
        node = ray.get_runtime_context().get_node_id()
        super().__init__(spec, node, ray.util.get_node_ip_address(), _session_dir())
        self.run()


class ControllerActor:
    """Follows the wanted number of servers and replaces lost actors, in a thread (`Controller`).

    If the thread fails, for example while Ray's head is away, the process ends and Ray restarts the actor.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        configure_logging("controller")
        self._controller = Controller(ray_cluster(spec))
        threading.Thread(target=self._run, name="controller", daemon=True).start()

    def _run(self) -> None:
        try:
            self._controller.run()
        except Exception:  # noqa: BLE001 (logged; the process ends)
            _log.exception("the controller failed and starts again")
            time.sleep(_BACKOFF_S)
        finally:
            os._exit(1)

    def report(self) -> None:
        """Answer once the actor runs. It has no process of its own to report."""


def ray_cluster(spec: ClusterSpec) -> RayCluster:
    """Build the cluster whose actors run on the connected Ray cluster."""
    return RayCluster(spec, ActorPool(), lambda: live_nodes(ray.nodes()), RoleActor)

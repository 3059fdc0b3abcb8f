"""A cluster of `eaas up`, on this machine or on Ray: names of its roles, and what commands need of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from eaas.config import ClusterConfig
    from eaas.net.tls import Identity

__all__ = [
    "BALANCER",
    "CLIENT",
    "FRONTEND",
    "MONITOR",
    "SERVER",
    "VLLM",
    "LaunchedCluster",
    "ServerProcess",
    "by_number",
    "free_number",
]

# Names of the processes that are one each.
BALANCER, FRONTEND, MONITOR, VLLM = "balancer", "frontend", "monitor", "vllm"
CLIENT, SERVER = "attention-client-", "expert-server-"
"""Names of clients and servers without their numbers."""


class ServerProcess(Protocol):
    """An expert server's process: a local child, or one that Ray runs."""

    @property
    def name(self) -> str:
        """Member id."""

    @property
    def pid(self) -> int:
        """Process id on its machine; 0 if it has not started."""

    @property
    def address(self) -> str | None:
        """host:port once it serves."""

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""

    def read(self) -> None:
        """Read what it has announced. Raises EaasError: it announced a failure."""

    def last_words(self) -> str:
        """Return the last line of its log."""

    def end(self) -> None:
        """End it without draining."""


_Process = TypeVar("_Process", bound=ServerProcess)


def by_number(processes: Iterable[_Process]) -> list[_Process]:
    """Select the expert servers among a cluster's processes, by number."""
    servers = (process for process in processes if process.name.startswith(SERVER))
    return sorted(servers, key=lambda server: int(server.name.removeprefix(SERVER)))


def free_number(taken: Collection[str]) -> int:
    """Return the lowest number that no expert server has, of the names that are taken."""
    return next(i for i in itertools.count() if f"{SERVER}{i}" not in taken)


class LaunchedCluster(Protocol):
    """A cluster, which may still be starting."""

    @property
    def config(self) -> ClusterConfig:
        """Settings of the cluster."""

    @property
    def model(self) -> Path:
        """Directory of the checkpoint."""

    @property
    def tls(self) -> Identity | None:
        """Identity for calls to the control plane; None without TLS."""

    @property
    def monitor_address(self) -> str:
        """host:port of the monitor, of several separated by commas; empty until it has started."""

    @property
    def endpoint(self) -> str:
        """URL of the HTTP endpoint; empty until it serves."""

    @property
    def page(self) -> str:
        """URL of the frontend, which has the page: the endpoint, or with vLLM another; empty: none serves."""

    def balancer_address(self) -> str | None:
        """Return host:port of the cluster's own balancer; None while it has none."""

    def running_servers(self) -> Sequence[ServerProcess]:
        """List the expert servers that run, ready or not, by number."""

    def add_server(self, *, others: Collection[str] = ()) -> ServerProcess:
        """Start an expert server; does not wait. `others`: names that other servers have."""

    def forget(self, name: str) -> None:
        """Remove a server that has left."""

"""A cluster on Ray: its roles' actors, for `eaas up --on ray` and for the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eaas.config import ClusterConfig
from eaas.errors import ClusterError
from eaas.net.listen_policy import identity
from eaas_cli.local.arguments import (
    balancer_words,
    client_words,
    frontend_words,
    server_words,
    vllm_words,
)
from eaas_cli.local.interface import (
    BALANCER,
    CLIENT,
    FRONTEND,
    MONITOR,
    SERVER,
    VLLM,
    by_number,
    free_number,
)
from eaas_cli.ray.placement import Node, actor_options, least_loaded, monitor_places
from eaas_cli.ray.pool import GRACE_S
from eaas_cli.ray.role import RoleSpec

if TYPE_CHECKING:
    from pathlib import Path

    from eaas_cli.local.interrupt import Interrupt
    from eaas_cli.ray.pool import Actor, ActorPool

__all__ = ["CONTROLLER", "ClusterSpec", "RayCluster", "stop_all_roles"]

CONTROLLER = "controller"
_OPERATOR = "operator"
_POLL_S = 0.25
_MONITOR_S = 60.0


@dataclass(frozen=True)
class ClusterSpec:
    """Everything that the controller and the roles' actors need, on any node.

    Attributes:
        model: Directory of the checkpoint, on every node that has it.
        servers: Expert servers at the start.
        redundancy: Servers that hold each expert.
        clients: Attention clients.
        engine: transformers or vllm.
        config: Settings; the roles also read `config_text`.
        config_text: Text of `cluster.yaml`; None if there is none.
        flags: Options of every role on certificates.
        environment: Settings from the environment of `eaas up`, by command.
        resources: What an actor of each kind reserves ("expert_server", "attention_client", "control").
        loopback: Members listen on loopback only, since the Ray cluster has one node and there is no TLS.
        home: Ray's id of the node that ran `eaas up`; the endpoint stays there if it can.
        candidates: Nodes that may run the monitor, best first.
        monitor_port: Port of the monitor at each candidate.
    """

    model: Path
    servers: int
    redundancy: int
    clients: int
    engine: str
    config: ClusterConfig
    config_text: str | None
    flags: tuple[str, ...]
    environment: Mapping[str, Mapping[str, str]]
    resources: Mapping[str, Mapping[str, float]]
    loopback: bool
    home: str
    candidates: tuple[Node, ...]
    monitor_port: int

    @property
    def monitor_addresses(self) -> str:
        """Every address at which the monitor may be, for `--join`."""
        hosts = ["127.0.0.1"] if self.loopback else [node.address for node in self.candidates]
        return ",".join(f"{host}:{self.monitor_port}" for host in hosts)


class RayCluster:
    """The roles' actors of a cluster on Ray. Not thread-safe.

    Args:
        spec: The cluster.
        pool: Its actors.
        nodes: Returns the live nodes, the head first.
        actor: Class of the roles' actors, which gets a `RoleSpec`.

    Raises:
        ConfigError: The operator's certificate cannot be read.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        pool: ActorPool,
        nodes: Callable[[], list[Node]],
        actor: type,
    ) -> None:
        self.spec, self.config, self.model = spec, spec.config, spec.model
        self.monitor_address = spec.monitor_addresses
        self.tls = identity(spec.config.security, _OPERATOR)
        self.pool = pool
        self._nodes = nodes
        self._actor = actor
        # Node for which each server was created.
        self._intended: dict[str, str] = {}

    @property
    def endpoint(self) -> str:
        """URL of the HTTP endpoint; empty while it does not serve."""
        return self._address_of(VLLM) or "" if self._by_vllm else self.page

    @property
    def page(self) -> str:
        """URL of the frontend, which has the page; empty while it does not serve."""
        return self._address_of(FRONTEND) or ""

    @property
    def _by_vllm(self) -> bool:
        return self.spec.engine == "vllm"

    def balancer_address(self) -> str | None:
        """Return host:port of the balancer; None while it does not serve."""
        return self._address_of(BALANCER)

    # -- start and stop --------------------------------------------------------------------------------

    def start(
        self,
        timeout_s: float,
        interrupt: Interrupt | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the actors of all roles and wait until they serve. A failed start leaves none behind.

        Args:
            timeout_s: Deadline.
            interrupt: Ends the start.
            on_wait: Called several times a second.

        Raises:
            EaasError: A role failed (its message), or not all served in time.
            Interrupted: A signal came.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self.create_monitor()
            self._wait([MONITOR], min(deadline, time.monotonic() + _MONITOR_S), interrupt, on_wait)
            names = [MONITOR, BALANCER]
            if self.config.frontend.dashboard or not self._by_vllm:
                names.append(FRONTEND)
            clients = [f"{CLIENT}{number}" for number in range(self.spec.clients)]
            names += [VLLM] if self._by_vllm else clients
            for name in names[1:]:
                self.recreate(name)
            for _ in range(self.spec.servers):
                names.append(self.add_server().name)
            self._wait(names, deadline, interrupt, on_wait)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every role, then its actor. Idempotent."""
        self.pool.adopt()
        stop_all_roles(self.pool)

    def _wait(
        self,
        names: list[str],
        deadline: float,
        interrupt: Interrupt | None,
        on_wait: Callable[[], None],
    ) -> None:
        while True:
            self.pool.poll(_POLL_S)
            for name in names:
                report = self.pool.actors[name].report
                if report is not None and report.failure is not None:
                    raise ClusterError(f"{name} on {report.ip}: {report.failure}")
            missing = [name for name in names if not self._address_of(name)]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"not ready in time: {', '.join(map(self._why, missing))}")
            on_wait()
            if interrupt is not None:
                interrupt.wait(_POLL_S)
            else:
                time.sleep(_POLL_S)

    def _why(self, name: str) -> str:
        if self.pool.actors[name].report is None:
            return f"{name} (no node of Ray has room for it: see `ray status`)"
        return name

    # -- roles -----------------------------------------------------------------------------------------

    def create_monitor(self) -> None:
        """Create the monitor's actor on the best candidate; Ray moves it to another one if that is lost.

        Raises:
            ClusterError: No candidate is alive. A former actor is still there.
        """
        places = monitor_places(self.spec.candidates, self._nodes())
        if not places:
            hosts = " or ".join(node.address for node in self.spec.candidates)
            raise ClusterError(
                f"no node can run the monitor: members look for it at {hosts}; start Ray there"
            )
        port = str(self.spec.monitor_port)
        words = ("monitor", "--host", "{host}", "--port", port, "--data-dir", "{data}")
        self._create(
            MONITOR, words, actor_options(self.spec.resources["control"], places[:1], places)
        )

    def create_balancer(self) -> None:
        """Create the balancer's actor, on Ray's head if that has room."""
        words = balancer_words(self.monitor_address, self.spec.servers, self.spec.redundancy)
        head = [self.spec.candidates[0].node_id]
        options = actor_options(self.spec.resources["control"], head)
        self._create(BALANCER, (*words, "--host", "{host}"), options)

    def create_endpoint(self, name: str) -> None:
        """Create the actor of the frontend, or of vLLM, on the node of `eaas up` if that has room."""
        endpoint = self.config.frontend
        given = endpoint.host if "host" in endpoint.model_fields_set else "{host}"
        config = self.config.model_copy(
            update={"frontend": endpoint.model_copy(update={"host": given})}
        )
        at, model = self.monitor_address, self.spec.model
        if name == VLLM:
            words, kind = vllm_words(config, name, at, model), "attention_client"
        else:
            options = {"operator_page": False, "page_only": self._by_vllm}
            words, kind = frontend_words(config, name, at, model, **options), "control"
        self._create(name, words, actor_options(self.spec.resources[kind], [self.spec.home]))

    def create_client(self, name: str) -> None:
        """Create the actor of an attention client, on the node of `eaas up` if that has room."""
        client = self.config.attention_client.model_copy(update={"engine_host": "{host}"})
        config = self.config.model_copy(update={"attention_client": client})
        words = client_words(config, name, self.monitor_address, self.spec.model)
        options = actor_options(self.spec.resources["attention_client"], [self.spec.home])
        self._create(name, words, options)

    def create_server(self, name: str) -> Actor:
        """Create the actor of an expert server, on the node with the fewest if that has room."""
        threads = self.config.expert_server.threads or "{threads}"
        words = server_words(self.config, name, self.monitor_address, self.spec.model, threads)
        node = least_loaded(self._nodes(), self._places())
        if node is not None:
            self._intended[name] = node
        options = actor_options(
            self.spec.resources["expert_server"], [] if node is None else [node]
        )
        self._create(name, (*words, "--host", "{host}"), options)
        return self.pool.actors[name]

    def _places(self) -> Iterator[str]:
        """Yield the node of each expert server; that for which it was created if it has not reported yet."""
        for server in by_number(self.pool.actors.values()):
            if server.report is not None:
                yield server.report.node
            elif server.name in self._intended:
                yield self._intended[server.name]

    def recreate(self, name: str) -> None:
        """Create an actor again that Ray does not start again.

        Raises:
            ClusterError: No node can run the monitor.
        """
        if name == MONITOR:
            self.create_monitor()
        elif name == BALANCER:
            self.create_balancer()
        elif name in (FRONTEND, VLLM):
            self.create_endpoint(name)
        elif name.startswith(CLIENT):
            self.create_client(name)
        else:
            self.create_server(name)

    def _create(self, name: str, words: tuple[str, ...], options: dict[str, object]) -> None:
        config = ("--config", "{config}") if self.spec.config_text is not None else ()
        role = RoleSpec(
            name=name,
            words=(*words, *config, *self.spec.flags),
            environment=self.spec.environment[words[0]],
            config=self.spec.config_text,
            share=-(-self.spec.servers // max(1, len(self._nodes()))),
            host="127.0.0.1" if self.spec.loopback else "",
            may_leave=name.startswith(SERVER),
        )
        self.pool.create(name, self._actor, role, options)

    def _address_of(self, name: str) -> str | None:
        actor = self.pool.actors.get(name)
        return actor.address if actor is not None else None

    # -- scaling ---------------------------------------------------------------------------------------

    def running_servers(self) -> list[Actor]:
        """List the expert servers that have not left, by number."""
        return [server for server in by_number(self.pool.actors.values()) if server.running]

    def left_servers(self) -> list[str]:
        """List the expert servers that have left and are not forgotten yet."""
        return [
            server.name for server in by_number(self.pool.actors.values()) if not server.running
        ]

    def add_server(self, *, others: Collection[str] = ()) -> Actor:
        """Create another expert server, with the lowest free number; does not wait for it."""
        return self.create_server(f"{SERVER}{free_number({*self.pool.actors, *others})}")

    def forget(self, name: str) -> None:
        """Remove the actor of a server that has left."""
        self.pool.kill(name)


def stop_all_roles(pool: ActorPool) -> None:
    """End every role of a cluster, then its actor; the endpoint first and the monitor last. Idempotent."""
    pool.poll(GRACE_S)
    pool.kill(CONTROLLER)
    pool.stop([name for name in (FRONTEND, VLLM) if name in pool.actors])
    pool.stop([name for name in pool.actors if name != MONITOR])
    pool.stop([MONITOR])

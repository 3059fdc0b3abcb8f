"""The launcher: starts, watches and ends the processes of a cluster on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from eaas.checkpoint import precheck
from eaas.config import ClusterConfig
from eaas.cores import server_core, usable_cores
from eaas.errors import ClusterError
from eaas.free_memory import free_bytes
from eaas.net import server_records
from eaas.net.listen_policy import guarded_keys, identity, only_here
from eaas_cli.local.arguments import (
    balancer_words,
    check_endpoint_port,
    client_words,
    frontend_words,
    make_log_dir,
    monitor_words,
    refuse_few_servers,
    refuse_missing_vllm,
    server_words,
    vllm_words,
)
from eaas_cli.local.by_hand import find_started_by_hand
from eaas_cli.local.devices import refuse_shared_device
from eaas_cli.local.fork_server import ForkServer, start_fork_server
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
from eaas_cli.local.interrupt import Interrupt
from eaas_cli.local.memory import memory_need
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready
from eaas_cli.local.restart import keep_port

__all__ = ["LocalCluster"]

_MONITOR_S = 30.0
_END_S = 5.0
# vLLM has several processes to end.
_VLLM_END_S = 12.0
_OPERATOR = "operator"
# Number of former pids that a name's next process reports. The leases of earlier ones have expired.
_ENDED_PIDS = 8


class LocalCluster:
    """Monitor, balancer, expert servers, attention clients and a frontend, each a process on this machine.

    The kernel ends the children with this process: nothing outlives a launcher that crashes.

    Args:
        config: The children get these of its settings: the monitor's address and directory; the endpoint's
            host, port, transport and keys; the servers' threads, kernel and quantization; security.
        config_file: All other settings; the children read the file.
        log_dir: Directory of the children's logs; None: they are not kept.
        clients: Attention clients, behind one frontend; 0 if the caller is the client.
        engine: transformers, or vLLM, which serves the endpoint; then the frontend serves the page alone.
        operator_page: Show buttons that kill and start servers, if only this machine can connect.
        fork_server: Forks the processes, and keeps running afterwards. None: the cluster starts its own.
        devices: GPU of each server ("cuda:0"), instead of `servers`; empty: the servers compute on the CPU.

    Raises:
        ConfigError: Fewer servers than the redundancy; an unusable log_dir or host; a listen address that
            needs TLS or keys; unreadable certificates or keys; the engine is not installed; the model's
            weights take more memory than is free; the settings name a GPU for several servers, and `devices`
            is empty.
        CheckpointError: The files of the model cannot be served.
        PortInUseError: The endpoint's port is taken.
    """

    def __init__(
        self,
        model: Path,
        *,
        servers: int = 3,
        redundancy: int = 2,
        config: ClusterConfig | None = None,
        config_file: Path | None = None,
        log_dir: Path | None = None,
        clients: int = 1,
        engine: Literal["transformers", "vllm"] = "transformers",
        operator_page: bool = False,
        fork_server: ForkServer | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        self.config = config or ClusterConfig()
        servers = len(devices) or servers
        refuse_few_servers(servers, redundancy, on_devices=bool(devices))
        refuse_shared_device(self.config, servers, devices)
        self._devices = tuple(devices)
        security, endpoint = self.config.security, self.config.frontend
        # The launcher drains servers, which needs the role of an operator.
        self.tls = identity(security, _OPERATOR)
        if self.tls is not None:
            # Imported here: only TLS needs cryptography.
            from eaas_cli.certificates import refuse_expired

            refuse_expired(self.tls.directory)
        self.memory = memory_need(
            precheck(model, tokenizer=clients > 0),
            redundancy,
            clients,
            self.config.expert_server.quantization,
        )
        # The experts of GPUs take none of this machine's memory.
        on_gpus = devices or self.config.expert_server.device != "cpu"
        here = replace(self.memory, experts=0) if on_gpus else self.memory
        here.refuse_more_than(free_bytes())
        if clients:
            if engine == "vllm":
                refuse_missing_vllm()
            check_endpoint_port(endpoint.host, endpoint.port)
            guarded_keys(security, endpoint.host, endpoint.api_key_file)
        self.clients = clients
        self._engine = engine
        self._operator_page = operator_page and only_here(endpoint.host)
        self._fork_server = fork_server
        self._owns_fork_server = fork_server is None
        self.model = model.resolve()
        self.servers = servers
        self.redundancy = redundancy
        self._config_flags = ["--config", str(config_file.resolve())] if config_file else []
        if security.tls_dir:
            self._config_flags += ["--tls", str(Path(security.tls_dir).resolve())]
        if security.insecure:
            self._config_flags += ["--insecure"]
        if log_dir is not None:
            make_log_dir(log_dir)
        self.log_dir = log_dir
        self.children: dict[str, ChildProcess] = {}
        # Start time of each process that this cluster started or adopted, by pid, also if it has ended.
        self.births: dict[int, int] = {}
        # The latest process of each name.
        self._latest: dict[str, ChildProcess] = {}
        self.monitor_address = ""
        self.endpoint = self.page = ""

    # -- start and stop -------------------------------------------------------------------------------

    def start(
        self,
        timeout_s: float = 120.0,
        interrupt: Interrupt | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Start all processes and wait until they serve. A failed start leaves no process behind.

        Args:
            timeout_s: Deadline.
            interrupt: Ends the start.
            on_wait: Called at least twice a second while servers load their experts.

        Raises:
            EaasError: A process failed (its message) or was not ready in time.
            Interrupted: A signal came.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._fork_server is None:
                self.start_fork_server()
            monitor = self._spawn(MONITOR, *monitor_words(self.config))
            wait_ready([monitor], _MONITOR_S, interrupt)
            assert monitor.address is not None
            self.monitor_address = monitor.address
            monitor.arguments = keep_port(monitor.arguments, monitor.address)
            # A cluster of several monitors names all of them.
            address = self.monitor_address
            words = balancer_words(address, self.servers, self.redundancy)
            others = [self._spawn(BALANCER, *words)]
            wait_ready([self.fork_server], deadline - time.monotonic(), interrupt)
            others += [self._spawn_server(i) for i in range(self.servers)]
            others += self._spawn_endpoint(address)
            wait_ready(
                others, deadline - time.monotonic(), interrupt, needed=[monitor], on_wait=on_wait
            )
            self.page = self._fixed_url(FRONTEND)
            self.endpoint = self._fixed_url(VLLM) or self.page
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster, adopted ones too: SIGTERM, then SIGKILL. Idempotent.

        The endpoint is first, so that running requests can end; the monitor is last.
        """
        # The requests that the endpoint finishes need clients and experts. The monitor is last, because it
        # stops the members that this launcher did not start.
        self.find_started_by_hand()
        stop_all((c for c in self.children.values() if c.name == VLLM), grace_s=_VLLM_END_S)
        # A second signal: no wait for running requests.
        stop_all((c for c in self.children.values() if c.name == FRONTEND), at_once=True)
        others = [c for c in self.children.values() if c.name not in (FRONTEND, VLLM, MONITOR)]
        stop_all(others, at_once=True)
        stop_all(c for c in self.children.values() if c.name == MONITOR)
        server_records.prune()
        if self._owns_fork_server and self._fork_server is not None:
            self._fork_server.end()
            self._fork_server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ended(self) -> list[ChildProcess]:
        """List the processes that have ended and have no successor, for supervision and adoption."""
        return [child for child in self.children.values() if not child.running]

    def find_started_by_hand(self) -> list[ChildProcess]:
        """Adopt the processes that a person restarted with `restart_line` after they had ended.

        They belong to the cluster from now on and end with it. Supervision asks at each step.

        Returns:
            The newly adopted processes.
        """
        found: list[ChildProcess] = []
        if not self.monitor_address:
            # Until its port is fixed, the monitor's arguments match those of other clusters' monitors.
            return found
        for child in self.ended():
            again = find_started_by_hand(child.name, child.arguments)
            if again is not None:
                child.reap(_END_S)
                self._add(again)
                found.append(again)
        return found

    def restart(self, name: str, timeout_s: float = 60.0) -> None:
        """Restart a named process that has ended, and wait until it serves, for benchmarks and tests."""
        wait_ready([self.start_again(name)], timeout_s)

    def start_again(self, name: str) -> ChildProcess:
        """Restart a named process that has ended, with the same arguments; does not wait for it."""
        old = self.children[name]
        old.reap(_END_S)
        return self._start(name, old.arguments)

    @property
    def fork_server(self) -> ForkServer:
        """The fork server that forks this cluster's processes. The cluster must have started."""
        assert self._fork_server is not None
        return self._fork_server

    def start_fork_server(self) -> None:
        """Start or restart the fork server, which forks all later processes; does not wait for it."""
        if self._fork_server is not None:
            self._fork_server.reap(_END_S)
        embedded = self.clients > 0 and self._engine == "transformers"
        self._fork_server = start_fork_server(with_client=embedded)
        self._owns_fork_server = True

    # -- scaling ---------------------------------------------------------------------------------------

    def balancer_address(self) -> str | None:
        """Return host:port of the balancer that this launcher started; None while it starts."""
        return self.children[BALANCER].address

    def running_servers(self) -> list[ChildProcess]:
        """Expert servers of this cluster that run, ready or not, by number; scaling drains the last."""
        return [child for child in by_number(self.children.values()) if child.running]

    def add_server(self, *, model: bool = True, others: Collection[str] = ()) -> ChildProcess:
        """Start another expert server, with the lowest free number; does not wait for it.

        Args:
            model: Give it the checkpoint. False: other servers send the weights.
            others: Names of live servers that this cluster did not start.

        Raises ClusterError: each GPU has a server.
        """
        index = free_number({child.name for child in self.running_servers()} | set(others))
        if self._devices and index >= len(self._devices):
            raise ClusterError(
                f"{SERVER}{index} has no GPU: start again with more --devices than {','.join(self._devices)}"
            )
        self.forget(f"{SERVER}{index}")
        return self._spawn_server(index, model=model)

    def forget(self, name: str) -> None:
        """Remove an ended process of this name from the children, so that it is not reported or restarted."""
        child = self.children.pop(name, None)
        if child is not None:
            child.reap(_END_S)

    # -- processes ------------------------------------------------------------------------------------

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        return self._start(name, (*arguments, *self._config_flags))

    def _start(self, name: str, arguments: Sequence[str], module: str = "eaas_cli") -> ChildProcess:
        former = self._latest.get(name)
        ended: tuple[int, ...] = ()
        if former is not None and not former.running:
            # Several, because the monitor may list an earlier process if the last one never registered.
            ended = (*former.ended_pids, former.pid)[-_ENDED_PIDS:]
        if self._fork_server is not None and not self._fork_server.running:
            self.start_fork_server()
        forks = self._fork_server
        if forks is not None and (
            (name == FRONTEND and self._owns_fork_server)
            or (forks.address is None and name in (MONITOR, BALANCER))
        ):
            # They need nothing of what takes the fork server so long to import, and a frontend would keep it.
            # Where clusters share one, as in tests, the time counts.
            forks = None
        child = ChildProcess(
            name, arguments, self.log_dir, module, fork_server=forks, ended_pids=ended
        )
        self._add(child)
        return child

    def _add(self, child: ChildProcess) -> None:
        self.children[child.name] = self._latest[child.name] = child
        self.births[child.pid] = server_records.started_at(child.pid)

    def _spawn_endpoint(self, monitor: str) -> list[ChildProcess]:
        """Start the frontend, and its attention clients or vLLM; none if the caller is the client."""
        if not self.clients:
            return []
        config, by_vllm = self.config, self._engine == "vllm"
        started = []
        if config.frontend.dashboard or not by_vllm:
            words = frontend_words(
                config,
                FRONTEND,
                monitor,
                self.model,
                operator_page=self._operator_page,
                page_only=by_vllm,
            )
            started.append(self._spawn(FRONTEND, *words))
        if by_vllm:
            return [*started, self._spawn(VLLM, *vllm_words(config, VLLM, monitor, self.model))]
        for name in [f"{CLIENT}{number}" for number in range(self.clients)]:
            started.append(self._spawn(name, *client_words(config, name, monitor, self.model)))
        return started

    def _fixed_url(self, name: str) -> str:
        """Return the URL of a child that serves HTTP, whose next processes keep it; empty: no such child."""
        child = self.children.get(name)
        if child is None:
            return ""
        assert child.address is not None
        child.arguments = keep_port(child.arguments, child.address)
        return child.address

    def _spawn_server(self, index: int, *, model: bool = True) -> ChildProcess:
        name = f"{SERVER}{index}"
        threads = self.config.expert_server.threads or max(1, usable_cores() // self.servers)
        checkpoint = self.model if model else None
        core = server_core(self._engine, sorted(os.sched_getaffinity(0)), index)
        device = self._devices[index] if self._devices else None
        words = server_words(
            self.config, name, self.monitor_address, checkpoint, threads, core, device
        )
        return self._spawn(name, *words)

"""Starting, watching and ending the processes of a cluster on this machine."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from eaas import server_records
from eaas.checkpoint import precheck
from eaas.config import ClusterConfig
from eaas.cores import usable_cores
from eaas.errors import ClusterError, ConfigError, PortInUseError
from eaas.exposure import guarded_keys, identity, only_here
from eaas.local.by_hand import find_started_by_hand
from eaas.local.interrupt import Interrupt
from eaas.local.nursery import (
    CLIENT_MODULES,
    CONTROL_MODULES,
    SERVER_MODULES,
    Nursery,
    adopt_orphans,
)
from eaas.local.process import ChildProcess, stop_all, wait_ready
from eaas.local.restart import keep_port, restart_line

__all__ = ["LocalCluster"]

_MONITOR_S = 30.0
_END_S = 5.0
_LOOK_S = 0.05
_SERVER = "expert-server-"
_CLIENT, _MONITOR = "attention-client", "monitor"
_OPERATOR = "operator"
# Former processes of a name that the next one is told of; the lease of an earlier one is over.
_ENDED_PIDS = 8


class LocalCluster:
    """Monitor, balancer, expert servers and one attention client, each a process of this machine.

    The kernel ends the children when this process ends, so nothing outlives a launcher that crashes.

    Args:
        model: Directory of a checkpoint.
        servers: Expert servers.
        redundancy: Servers that hold each expert.
        config: Passed on are the monitor's address and directory, the endpoint's host, port, transport and
            keys, the servers' threads, kernel and quantization, and the security settings.
        config_file: Every other setting, which the children read for themselves.
        log_dir: Where the children's output goes; by default nowhere that lasts.
        attention_client: Start one, with its endpoint; False where the caller is the client itself.
        operator_page: Its page has buttons that kill and start servers, where only this machine can connect.
        nursery: Forks the processes; left running. By default the cluster has one of its own.

    Raises:
        ConfigError: Fewer servers than the redundancy asks for; log_dir or the host cannot be used, or is
            not to be, as others could connect; certificates or keys cannot be read.
        CheckpointError: The model cannot be served, as far as its files tell.
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
        attention_client: bool = True,
        operator_page: bool = False,
        nursery: Nursery | None = None,
    ) -> None:
        self.config = config or ClusterConfig()
        if redundancy > servers:
            raise ConfigError(
                f"--redundancy {redundancy} needs as many servers, --servers is {servers}: "
                f"give --servers {redundancy} or a lower --redundancy"
            )
        security, client = self.config.security, self.config.attention_client
        # Whoever asks its balancer to let servers go is an operator.
        self.tls = identity(security, _OPERATOR)
        if self.tls is not None:
            # Not at the top: without TLS nothing needs cryptography.
            from eaas.certs import refuse_expired

            refuse_expired(self.tls.directory)
        precheck(model)
        if attention_client:
            _check_port(client.host, client.port)
            guarded_keys(security, client.host, client.api_key_file)
        self._with_client = attention_client
        self._operator_page = operator_page and only_here(client.host)
        self._nursery = nursery
        self._owns_nursery = nursery is None
        self.model = model.resolve()
        self.servers = servers
        self.redundancy = redundancy
        self._config_flags = ["--config", str(config_file.resolve())] if config_file else []
        if security.tls_dir:
            self._config_flags += ["--tls", str(Path(security.tls_dir).resolve())]
        if security.insecure:
            self._config_flags += ["--insecure"]
        if log_dir is not None:
            _make_log_dir(log_dir)
        self.log_dir = log_dir
        self.children: dict[str, ChildProcess] = {}
        self._pids: set[int] = set()
        # The last process of each name that there was.
        self._lives: dict[str, ChildProcess] = {}
        self.monitor_address = ""
        self.endpoint = ""

    # -- life -----------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 120.0, interrupt: Interrupt | None = None) -> None:
        """Start everything and wait until all are SERVING. Nothing is left behind if that fails.

        Raises:
            EaasError: A process failed (its own words) or was not ready in time.
            Interrupted: The operator wants the end.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._nursery is None:
                self.start_fork_server()
            monitor = self._spawn_monitor()
            wait_ready([monitor], _MONITOR_S, interrupt)
            assert monitor.address is not None
            self.monitor_address = monitor.address
            monitor.arguments = keep_port(monitor.arguments, monitor.address)
            wait_ready([self.fork_server], deadline - time.monotonic(), interrupt)
            others = [self._spawn_server(i) for i in range(self.servers)]
            others.append(self._spawn_balancer())
            if self._with_client:
                others.append(self._spawn_client())
            wait_ready(others, deadline - time.monotonic(), interrupt, needed=[monitor])
            if self._with_client:
                client = self.children[_CLIENT]
                assert client.address is not None
                self.endpoint = client.address
                client.arguments = keep_port(client.arguments, client.address)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process: ask, wait, then kill. Idempotent."""
        # The client first, since requests that it lets end need the experts; the monitor last, since it
        # tells members that nobody knows here.
        self.find_started_by_hand()
        stop_all(c for c in self.children.values() if c.name == _CLIENT)
        others = [c for c in self.children.values() if c.name not in (_CLIENT, _MONITOR)]
        stop_all(others, at_once=True)
        stop_all(c for c in self.children.values() if c.name == _MONITOR)
        server_records.prune()
        if self._owns_nursery and self._nursery is not None:
            self._nursery.end()
            self._nursery = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def ended(self) -> list[ChildProcess]:
        """Processes that have ended by themselves or were killed."""
        return [child for child in self.children.values() if not child.running]

    def has_started(self, pid: int) -> bool:
        """Whether a process was started here, be it that it has ended."""
        return pid in self._pids

    def find_started_by_hand(self) -> list[ChildProcess]:
        """Look for processes that ended and that a person has started again, by `restart_line`.

        They belong to this cluster from now on: they are counted, and ended with it.

        Returns:
            Those that were not known before.
        """
        found: list[ChildProcess] = []
        if not self.monitor_address:
            # Until the monitor's port is known, its arguments are those of every other cluster's monitor.
            return found
        for child in self.ended():
            again = find_started_by_hand(child.name, child.arguments)
            if again is not None:
                child.reap(_END_S)
                self._add(again)
                found.append(again)
        return found

    def restart_line(self, child: ChildProcess) -> str:
        """What a person can paste into a shell, in any directory, to start the same again."""
        return restart_line(child.arguments, self.config)

    def restart(self, name: str, timeout_s: float = 60.0) -> None:
        """Start a process that has ended once more, and wait until it is SERVING."""
        wait_ready([self.start_again(name)], timeout_s)

    def start_again(self, name: str) -> ChildProcess:
        """Start a process that has ended once more; does not wait for it."""
        old = self.children[name]
        old.reap(_END_S)
        return self._start(name, old.arguments)

    @property
    def fork_server(self) -> Nursery:
        """The process that forks the others, of a cluster that was started."""
        assert self._nursery is not None
        return self._nursery

    def start_fork_server(self) -> None:
        """Start the process that forks the others, once more where it has ended; does not wait for it."""
        if self._nursery is not None:
            self._nursery.reap(_END_S)
        # Its children's exit codes must not be lost when it ends.
        adopt_orphans()
        client = CLIENT_MODULES if self._with_client else ()
        self._nursery = Nursery(CONTROL_MODULES + SERVER_MODULES + client)
        self._owns_nursery = True

    # -- servers come and go ---------------------------------------------------------------------------

    def scale(self, servers: int, timeout_s: float = 120.0) -> None:
        """Start servers, or have some leave, one at a time, until there are so many; waits for it.

        Raises:
            EaasError: A server could not be started, or does not leave, or not in time.
        """
        # Not at the top: `eaas --help` gets by without gRPC.
        from eaas.local.scaling import Scaler

        deadline = time.monotonic() + timeout_s
        scaler = Scaler(self)
        scaler.want(servers)
        while scaler.busy:
            scaler.step()
            if time.monotonic() > deadline:
                raise ClusterError(f"not {servers} servers after {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    def running_servers(self) -> list[ChildProcess]:
        """Expert servers that were started here and have not ended, in the order of their numbers."""
        servers = [c for c in self.children.values() if c.name.startswith(_SERVER) and c.running]
        return sorted(servers, key=lambda child: int(child.name.removeprefix(_SERVER)))

    def add_server(self, *, model: bool = True, others: Collection[str] = ()) -> ChildProcess:
        """Start one more, with the lowest number that is free; does not wait for it.

        Args:
            model: Give it the checkpoint. False: the others are to send it what it needs.
            others: Names of servers that live and were not started here. One of ours that died may have
                been started again by hand.
        """
        taken = {child.name for child in self.running_servers()} | set(others)
        index = next(i for i in itertools.count() if f"{_SERVER}{i}" not in taken)
        self.forget(f"{_SERVER}{index}")
        return self._spawn_server(index, model=model)

    def forget(self, name: str) -> None:
        """Let go of a process that has ended, if there is one of that name."""
        child = self.children.pop(name, None)
        if child is not None:
            child.reap(_END_S)

    # -- the roles ------------------------------------------------------------------------------------

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        return self._start(name, (*arguments, *self._config_flags))

    def _start(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        return self._launch(name, arguments)

    def _launch(self, name: str, arguments: Sequence[str], module: str = "eaas") -> ChildProcess:
        former = self._lives.get(name)
        ended: tuple[int, ...] = ()
        if former is not None and not former.running:
            # More than the last: that one may have ended before the monitor heard of it, which then knows an
            # earlier one.
            ended = (*former.ended_pids, former.pid)[-_ENDED_PIDS:]
        if self._nursery is not None and not self._nursery.running:
            self.start_fork_server()
        child = ChildProcess(
            name,
            arguments,
            self.log_dir,
            module,
            nursery=self._nursery,
            ended_pids=ended,
        )
        self._add(child)
        return child

    def _add(self, child: ChildProcess) -> None:
        self.children[child.name] = self._lives[child.name] = child
        self._pids.add(child.pid)

    def _spawn_monitor(self) -> ChildProcess:
        monitor = self.config.monitor
        return self._spawn(
            _MONITOR,
            *("monitor", "--host", monitor.host, "--port", str(monitor.port)),
            *(("--data-dir", str(Path(monitor.data_dir).resolve())) if monitor.data_dir else ()),
            "--stop-members-on-exit",
        )

    def _spawn_server(self, index: int, *, model: bool = True) -> ChildProcess:
        name = f"{_SERVER}{index}"
        server = self.config.expert_server
        threads = server.threads or max(1, usable_cores() // self.servers)
        return self._spawn(
            name,
            *("expert-server", "--id", name),
            *(("--model", str(self.model)) if model else ()),
            *("--join", self.monitor_address, "--threads", str(threads)),
            *("--kernel", server.kernel, "--quantization", server.quantization),
        )

    def _spawn_balancer(self) -> ChildProcess:
        return self._spawn(
            "balancer",
            *("balancer", "--join", self.monitor_address),
            *("--servers", str(self.servers), "--redundancy", str(self.redundancy)),
        )

    def _spawn_client(self) -> ChildProcess:
        client = self.config.attention_client
        return self._spawn(
            _CLIENT,
            *("attention-client", "--id", _CLIENT, "--model", str(self.model)),
            *("--join", self.monitor_address, "--transport", client.transport),
            *("--host", client.host, "--port", str(client.port)),
            *(
                ("--api-key-file", str(Path(keys).resolve()))
                if (keys := client.api_key_file)
                else ()
            ),
            *(("--operator-page",) if self._operator_page else ()),
        )


def _make_log_dir(wanted: Path) -> None:
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--log-dir {wanted}: {error.strerror}; give another directory"
        ) from error


def _check_port(host: str, port: int) -> None:
    """Fail before anything is started where the endpoint's address cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host}: {error.strerror}; give an address of this machine"
        ) from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"--host {host}: {error.strerror}; give an address of this machine"
                ) from error
            raise PortInUseError(
                f"{host}:{port}: {error.strerror}; choose another with --port, or stop what holds it"
            ) from error

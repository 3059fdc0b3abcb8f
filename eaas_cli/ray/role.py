"""In a Ray actor: keeps the process of one role running, and reports how it is."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eaas.cores import usable_cores
from eaas.errors import EaasError
from eaas.log import get_logger
from eaas_cli.local.process import ChildProcess, how_it_ended, stop_all
from eaas_cli.local.restart import Restarts, keep_port

__all__ = ["Report", "RoleProcess", "RoleSpec", "fill_in"]

_log = get_logger(__name__)
_STEP_S = 0.05
# Number of former pids that the next process reports to the monitor.
_ENDED_PIDS = 8
_MODULE = "eaas_cli.ray.child"


@dataclass(frozen=True)
class RoleSpec:
    """One role's process, for any node.

    Attributes:
        name: Member id, and name of the Ray actor.
        words: Arguments of the `eaas` program, with the placeholders of `fill_in`.
        environment: Settings of the machine on which `eaas up` ran.
        config: Text of `cluster.yaml`; None if there is none.
        share: Number of expert servers that share a node's cores.
        host: Address to listen on; empty: the node's own.
        may_leave: A process that ends with code 0 has left and is not started again.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    config: str | None
    share: int
    host: str
    may_leave: bool


@dataclass(frozen=True)
class Report:
    """State of a role's process, as its actor sees it.

    Attributes:
        node: Ray's id of the node.
        ip: Address of the node.
        pid: Process id of the role on that node; 0 while it does not run.
        address: host:port; None while it does not serve.
        kernel: Kernel that an expert server announced.
        failures: Ends in a row without 10 s of service between them.
        failure: Why it does not serve; None while it serves or starts.
        left: It has left the cluster and is not started again.
        niceness: Of the process. Ray's workers have 15 unless `RAY_worker_niceness` says otherwise.
    """

    node: str
    ip: str
    pid: int
    address: str | None
    kernel: str | None
    failures: int
    failure: str | None
    left: bool
    niceness: int


def fill_in(spec: RoleSpec, ip: str, config_file: str, data_dir: str) -> tuple[str, ...]:
    """Fill in the placeholders of a role's arguments on its node.

    {host}: address to listen on; {threads}: share of the node's cores; {config}: path of `cluster.yaml`;
    {data}: directory that is private to this actor. On a node without the checkpoint, an expert server gets
    no `--model`: other servers send it the weights.
    """
    values = {
        "{host}": spec.host or ip,
        "{threads}": str(max(1, usable_cores() // spec.share)),
        "{config}": config_file,
        "{data}": data_dir,
    }
    words = [values.get(word, word) for word in spec.words]
    if words[0] == "expert-server" and "--model" in words:
        at = words.index("--model")
        if not Path(words[at + 1]).is_dir():
            del words[at : at + 2]
    return tuple(words)


class RoleProcess:
    """Starts one role's process in a thread, and again whenever it ends, until it leaves. Thread-safe.

    Args:
        spec: The role.
        node: Ray's id of this node.
        ip: Address of this node.
        session_dir: Ray's directory on this node, which holds its logs; None: the log is not kept.
        start: Starts a process.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        spec: RoleSpec,
        node: str,
        ip: str,
        session_dir: Path | None,
        start: Callable[..., ChildProcess] = ChildProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._node = node
        self._ip = ip
        self._log_dir = session_dir / "logs" if session_dir else None
        self._start = start
        self._clock = clock
        # Removed with Ray's session if this actor is killed.
        self._own_dir = Path(tempfile.mkdtemp(prefix=f"eaas-{spec.name}-", dir=session_dir))
        config_file = self._own_dir / "cluster.yaml"
        if spec.config is not None:
            config_file.write_text(spec.config)
        self._words = fill_in(spec, ip, str(config_file), str(self._own_dir / "data"))
        # Ray sets it for the few cores of an actor; the roles set their threads themselves.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(spec.environment)
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._ended_pids: tuple[int, ...] = ()
        self._restarts = Restarts(starts_at=clock())
        self._failure: str | None = None
        self._left = False
        self._stopping = threading.Event()
        self._niceness = 0
        # The kernel kills the child when the thread that started it ends.
        self._thread = threading.Thread(target=self._supervise, name="supervise", daemon=True)

    def run(self) -> None:
        """Start supervising."""
        self._thread.start()

    def report(self) -> Report:
        """Return the state of the process."""
        with self._lock:
            child = self._child
            return Report(
                node=self._node,
                ip=self._ip,
                pid=child.pid if child is not None else 0,
                address=child.address if child is not None else None,
                kernel=child.kernel if child is not None else None,
                failures=self._restarts.failures,
                failure=self._failure,
                left=self._left,
                niceness=self._niceness,
            )

    def last_words(self) -> str:
        """Return the last line of the process's log."""
        with self._lock:
            return self._child.last_words() if self._child is not None else self._failure or ""

    def stop(self, grace_s: float) -> None:
        """End the process for good, without draining; by SIGKILL after `grace_s` seconds. Idempotent."""
        self._stopping.set()
        with self._lock:
            self._left = True
            if self._child is not None:
                stop_all([self._child], at_once=True, grace_s=grace_s)
                self._child = None
        shutil.rmtree(self._own_dir, ignore_errors=True)

    def _supervise(self) -> None:
        self._lower_niceness()
        while not self._stopping.wait(_STEP_S):
            with self._lock:
                self.step()

    def _lower_niceness(self) -> None:
        # Ray's workers have a niceness of 15, which their children inherit; only root may lower it.
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except PermissionError as error:
            _log.warning("%s keeps Ray's niceness: %s", self._spec.name, error)
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)

    def step(self) -> None:
        """Start the process if that is due, read what it announced, or plan a restart; never waits."""
        if self._left:
            return
        if self._child is None:
            if self._clock() >= (self._restarts.starts_at or 0.0):
                self._child = self._launch()
            return
        child = self._child
        try:
            child.read()
        except EaasError as error:
            self._failure = str(error)
        if child.running:
            if child.address is not None and self._restarts.serves_since is None:
                self._restarts.serves_since, self._failure = self._clock(), None
            return
        self._take_end(child)

    def _launch(self) -> ChildProcess:
        return self._start(
            # Ray has a log of its own named monitor.log.
            f"eaas-{self._spec.name}",
            (str(os.getpid()), *self._words),
            self._log_dir,
            _MODULE,
            ended_pids=self._ended_pids,
        )

    def _take_end(self, child: ChildProcess) -> None:
        code = child.process.returncode
        if code == 0 and self._restarts.serves_since is not None and self._spec.may_leave:
            self._left = True
            shutil.rmtree(self._own_dir, ignore_errors=True)
        else:
            self._restarts.ended(self._clock())
            if self._failure is None:
                words = child.last_words()
                self._failure = f"{child.name} {how_it_ended(code)}; its last words: {words}"
            _log.warning("%s", self._failure)
        if child.address is not None and "--port" in self._words:
            self._words = keep_port(self._words, child.address)
        self._ended_pids = (*self._ended_pids, child.pid)[-_ENDED_PIDS:]
        child.reap(0.0)
        self._child = None

"""deploy/slurm/eaas.sbatch on a real Slurm: processes and nodes are killed while answers are streamed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from eaas_cli.bench.load import Load, LoadResult
from helper_process import output_of
from hosts import Host, Hosts, why_no_hosts
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.integration, pytest.mark.timeout(900)]

_PROGRAMS = ("slurmctld", "slurmd", "munged", "ip")
_CALL_S = 60.0

# /tmp, /dev/shm and /run are each node's own, except `shared`.
_MOUNTS = """
mkdir -p {box}/keep; mount --bind {shared} {box}/keep
for d in /tmp /dev/shm /run; do mount -t tmpfs tmpfs $d; done
mkdir -p {shared}; mount --bind {box}/keep {shared}
mount --bind {box}/hosts /etc/hosts
"""

_CONF = """
ClusterName=test
SlurmctldHost={host}({gateway})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={box}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
StateSaveLocation={box}/state
SlurmdSpoolDir={box}/spool-%n
SlurmctldPidFile={box}/slurmctld.pid
SlurmdPidFile={box}/slurmd-%n.pid
SlurmctldLogFile={box}/slurmctld.log
SlurmdLogFile={box}/slurmd-%n.log
"""


def why_not() -> str | None:
    """Why no Slurm cluster can run here; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm, iproute2)"
    return why_no_hosts() or None


def processes_of(node: Host, pattern: str) -> list[str]:
    """Ids, on the node, of the processes whose command line matches."""
    lines = node.check("ps", "axww", "-o", "pid=,args=").splitlines()
    return [
        pid for pid, line in (each.split(maxsplit=1) for each in lines) if re.search(pattern, line)
    ]


class SlurmBox:
    """slurmctld on the machine, slurmd on each node, one munged for all.

    Attributes:
        directory: Every node sees it; it is removed at the end.
        nodes: The nodes.

    Args:
        shared: Directory that every node sees, too, although it may be in `/tmp`, which is each node's own.
        nodes: Number of nodes; the last one is under another switch (rack) than the others.
        cores: CPUs that each node claims to have.
    """

    def __init__(self, shared: Path, nodes: int = 3, cores: int = 4) -> None:
        self._shared = shared
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
        self._stack = contextlib.ExitStack()
        self.environment: dict[str, str] = dict(os.environ)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._start(nodes, cores)
            undo.pop_all()

    def _start(self, nodes: int, cores: int) -> None:
        box = self.directory
        self._stack.callback(shutil.rmtree, box, ignore_errors=True)
        self._munge(box / "munge")
        (box / "state").mkdir()
        # Mounted before its content is known.
        (box / "hosts").touch()
        self._world = Hosts(nodes, _MOUNTS.format(box=box, shared=self._shared))
        self._stack.callback(self._world.close)
        self.nodes = self._world.hosts
        names = [node.name for node in self.nodes]
        gateway = self._world.gateway
        conf = [_CONF.format(gateway=gateway, box=box, host=socket.gethostname())]
        conf += [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cores} State=UNKNOWN"
            for node in self.nodes
        ]
        conf.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO")
        (box / "slurm.conf").write_text("\n".join(conf) + "\n")
        (box / "topology.conf").write_text(
            f"SwitchName=rack1 Nodes={','.join(names[:-1])}\nSwitchName=rack2 Nodes={names[-1]}\n"
            "SwitchName=top Switches=rack1,rack2\n"
        )
        hosts = [f"{node.address} {node.name}" for node in self.nodes]
        (box / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        self.environment |= {"SLURM_CONF": str(box / "slurm.conf")}
        self._run_beside("slurmctld", "-D")
        for node in self.nodes:
            (box / f"spool-{node.name}").mkdir()
            self._join(node)
        self.wait_for_nodes("idle", *names)

    def _join(self, node: Host) -> None:
        node.check("slurmd", "-N", node.name, environment=self.environment)

    def _run_beside(self, *command: str) -> None:
        daemon = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)
        self._stack.callback(daemon.wait, _CALL_S)
        self._stack.callback(daemon.terminate)

    def wait_for_nodes(self, state: str, *names: str) -> None:
        """Wait until these nodes have a state, such as idle or down."""
        # An asterisk: it does not respond.
        states = ("sinfo", "--noheader", "--format=%T", f"--nodes={','.join(names)}")
        eventually(lambda: self.slurm(*states).replace("*", "").split() == [state], _CALL_S, state)

    def _munge(self, place: Path) -> None:
        place.mkdir(mode=0o755)
        key = place / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        # --force: of a directory that is not munge's own user's.
        self._run_beside(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--{name}-file={place / name}" for name in ("pid", "log", "seed")),
            f"--socket={place / 'socket'}",
        )
        eventually((place / "socket").exists, _CALL_S, "munged")

    def start_again(self, index: int) -> None:
        """Start a node that was killed."""
        self.nodes[index] = self._world.new(index + 1)
        self._join(self.nodes[index])

    def slurm(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands; a failure is the test's."""
        return output_of(
            *command, timeout_s=_CALL_S, env=self.environment | dict(environment or {})
        )

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; of an ended job COMPLETED, CANCELLED, FAILED."""
        words = self.slurm("scontrol", "show", "job", job).split()
        (state,) = [w.partition("=")[2] for w in words if w.startswith("JobState=")]
        return state

    def close(self) -> None:
        """End every process and remove network and files. Idempotent."""
        self._stack.close()


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "eaas.sbatch"
PATIENCE_S = 240.0
PROMPTS = [np.random.default_rng(i).integers(16, 250, 16).tolist() for i in range(4)]
TOKENS = 250
SERVERS_PER_NODE = 2


@pytest.fixture(scope="module")
def box() -> Iterator[SlurmBox]:
    if reason := why_not():
        pytest.skip(reason)
    box = SlurmBox(ROOT)
    yield box
    box.close()


class Job:
    """A job that serves the demo model."""

    def __init__(self, box: SlurmBox, nodes: int) -> None:
        self._box = box
        self.run_dir = Path(tempfile.mkdtemp(prefix="job-", dir=box.directory))
        self.log = self.run_dir / "log"
        self.id = box.slurm(
            *("sbatch", "--parsable", f"--nodes={nodes}", f"--output={self.log}", str(SCRIPT)),
            environment={
                "MODEL": str(ROOT / "examples" / "demo"),
                "VENV": str(Path(sys.executable).parents[1]),
                "SERVERS_PER_NODE": str(SERVERS_PER_NODE),
                "THREADS": "1",
                "SCRATCH": "/tmp",
                "RUN_DIR": str(self.run_dir),
                # A compiler would take the cores of this machine, which all nodes share.
                "EAAS_ATTENTION_CLIENT__COMPILE": "false",
            },
        ).strip()
        self.endpoint = self.wait_until_it_serves()
        self.key = (self.run_dir / "keys").read_text()

    def wait_until_it_serves(self) -> str:
        place = self.run_dir / "endpoint"
        eventually(
            lambda: (
                place.exists() or self.state not in ("RUNNING", "PENDING", "COMPLETING", "REQUEUED")
            ),
            2 * PATIENCE_S,
            "the endpoint",
        )
        assert place.exists(), self.log.read_text()
        return place.read_text().strip()

    @property
    def state(self) -> str:
        return self._box.state(self.id)

    def status(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = httpx.get(f"{self.endpoint}/eaas/v1/status", headers=headers, timeout=30)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def member(self, name: str) -> dict[str, Any]:
        (member,) = [m for m in self.status()["members"] if m["id"] == name]
        return dict(member)

    def streams(self) -> Load:
        return Load(lambda: self.endpoint, PROMPTS, TOKENS, again=True)


def strike(
    job: Job, quiet: LoadResult, blow: Callable[[], object], over: Callable[[], bool]
) -> None:
    """Stream answers during a blow and until its consequence: none fails, each is the usual one."""
    streams = job.streams()
    time.sleep(quiet.seconds / 4)
    assert streams.running
    blow()
    rounds = [streams.result()]
    deadline = time.monotonic() + PATIENCE_S
    while not over() or len(rounds) == 1:
        assert time.monotonic() < deadline, job.log.read_text()
        rounds.append(job.streams().result())
    for faulted in rounds:
        assert [answer.error for answer in faulted.failed] == []
        assert [a.text for a in faulted.answers] == [a.text for a in quiet.answers]


def processes(node: Host, role: str, more: str = "") -> list[str]:
    """Ids of a role's processes on a node; the line of the loop that starts one again begins otherwise."""
    return processes_of(node, rf"^\S+ \S*eaas {role} .*{more}")


def left_behind(box: SlurmBox) -> list[str]:
    """Processes and files of ours on the nodes. Python's and torch's own caches in /tmp are not ours."""
    found = []
    for node in box.nodes:
        found += [f"{node.name}: {p}" for p in processes_of(node, r"eaas|slurmstepd")]
        found += [f"{node.name}: {f}" for f in node.check("ls", "-A", "/dev/shm").split()]
        files = node.check("find", "/tmp", "-mindepth", "1", "-not", "-path", f"{ROOT}*").split()
        found += [f"{node.name}: {f}" for f in files if re.search(r"eaas|/tmp\.", f)]
    return found


# -- one job for these tests, in this order ----------------------------------------------------------


@pytest.fixture(scope="module")
def job(box: SlurmBox) -> Job:
    return Job(box, 3)


@pytest.fixture(scope="module")
def quiet(job: Job) -> Iterator[LoadResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAAS_API_KEY", job.key)
        yield job.streams().result()


def test_it_serves(box: SlurmBox, job: Job) -> None:
    status = job.status()
    assert status["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 2}
    servers = {m["id"] for m in status["members"] if m["role"] == "expert-server"}
    assert servers == {
        f"expert-server-{node.name}-{i}" for node in box.nodes for i in range(SERVERS_PER_NODE)
    }
    assert httpx.get(f"{job.endpoint}/v1/models", timeout=30).status_code == 401
    for node, rack in zip(box.nodes, ("rack1", "rack1", "rack2"), strict=True):
        server, _ = processes(node, "expert-server")
        environment = node.check("cat", f"/proc/{server}/environ").split("\0")
        assert f"EAAS_EXPERT_SERVER__NODE=top.{rack}/{node.name}" in environment
        line = node.check("cat", f"/proc/{server}/cmdline").split("\0")
        copy = line[line.index("--model") + 1]
        assert copy == f"/tmp/eaas-{job.id}/demo"
        assert {"config.json", "model.safetensors"} <= set(node.check("ls", copy).split())


def test_a_server_that_is_killed(box: SlurmBox, job: Job, quiet: LoadResult) -> None:
    node = box.nodes[1]
    name = f"expert-server-{node.name}-0"
    (victim,) = processes(node, "expert-server", name)
    strike(
        job,
        quiet,
        lambda: node.check("kill", "-KILL", victim),
        lambda: (job.member(name)["incarnation"], job.member(name)["state"]) == (2, "SERVING"),
    )
    assert job.status()["coverage"]["min_replicas"] == 2


@pytest.mark.parametrize("role", ["monitor", "balancer"])
def test_a_control_process_that_is_killed(
    box: SlurmBox, job: Job, quiet: LoadResult, role: str
) -> None:
    node = box.nodes[0]
    (victim,) = processes(node, role)
    strike(
        job,
        quiet,
        lambda: node.check("kill", "-KILL", victim),
        lambda: processes(node, role) not in ([], [victim]),
    )
    eventually(lambda: job.status()["coverage"]["min_replicas"] == 2, PATIENCE_S)


def test_a_node_that_is_lost(box: SlurmBox, job: Job, quiet: LoadResult) -> None:
    node = box.nodes[2]

    def again_twice() -> bool:
        return bool(job.status()["coverage"]["min_replicas"] == 2)

    def is_dead() -> bool:
        return bool(job.member(f"expert-server-{node.name}-0")["state"] == "DEAD")

    # Its experts move to the other nodes after balancer.dead_grace_s.
    strike(job, quiet, node.kill, lambda: is_dead() and again_twice())
    box.wait_for_nodes("down", node.name)
    strike(job, quiet, lambda: None, again_twice)
    assert job.state == "RUNNING"


def test_its_end_in_order(box: SlurmBox, job: Job) -> None:
    """The node that was lost is no longer the job's, and does not hold the end up."""
    box.slurm("scancel", "--batch", "--signal=TERM", job.id)
    eventually(lambda: job.state != "RUNNING" and job.state != "COMPLETING", PATIENCE_S)
    assert job.state == "COMPLETED", job.log.read_text()
    log = job.log.read_text()
    # In the order of a request's way.
    said = [
        "frontend uvicorn.error: Shutting down",
        "leaving: ",
        "balancer ends",
        "monitor ends",
    ]
    places = [log.rfind(words) for words in said]
    assert min(places) > -1, log
    assert places == sorted(places), log
    box.start_again(2)
    box.wait_for_nodes("idle", *(node.name for node in box.nodes))
    assert left_behind(box) == []
    assert not (job.run_dir / "endpoint").exists()


def test_scancel(box: SlurmBox) -> None:
    """Slurm signals all processes at once, and kills what is left after KillWait (30 s)."""
    job = Job(box, 2)
    box.slurm("scancel", job.id)
    eventually(lambda: job.state == "CANCELLED", PATIENCE_S)
    eventually(lambda: left_behind(box) == [], 30.0, f"no {left_behind(box)}")


def test_the_first_node_is_lost(box: SlurmBox) -> None:
    """The job has neither script nor endpoint any more; requeued, it starts anew after two minutes."""
    job = Job(box, 2)
    words = box.slurm("scontrol", "show", "job", job.id).split()
    (name,) = [w.partition("=")[2] for w in words if w.startswith("BatchHost=")]
    (first,) = [i for i, node in enumerate(box.nodes) if node.name == name]
    box.nodes[first].kill()
    box.wait_for_nodes("down", name)
    (job.run_dir / "endpoint").unlink()
    box.slurm("scontrol", "requeue", job.id)
    endpoint = job.wait_until_it_serves()
    assert endpoint != job.endpoint
    job.endpoint = endpoint
    assert job.status()["coverage"]["min_nodes"] == 2
    box.slurm("scancel", job.id)
    eventually(lambda: job.state == "CANCELLED", PATIENCE_S)
    assert processes_of(box.nodes[1], r"eaas \S+ --") == []

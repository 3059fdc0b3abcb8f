"""deploy/slurm/eaas.sbatch on a real Slurm: processes and nodes are killed while answers are streamed."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from eaas_cli.bench.load import Load, LoadResult
from hosts import Host
from slurm_box import SlurmBox, processes_of, why_not
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.integration, pytest.mark.timeout(900)]

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

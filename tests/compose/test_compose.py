"""`docker compose up` on a real engine: containers are killed, added and removed while requests run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from browser import chromium, open_page
from completions import Load
from helper_process import output_of
from service_box import free_port
from waiting import eventually

pytestmark = [
    pytest.mark.compose,
    pytest.mark.usefixtures("engine"),
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[2]
# Includes the first build of the image on a busy machine.
_UP_S = 1500.0
_CALL_S = 300.0
PATIENCE_S = 120.0
STREAMS, TOKENS = 6, 48


def why_not() -> str | None:
    """Why no containers can run here; None if they can."""
    try:
        done = subprocess.run(
            ["docker", "compose", "ls"], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return "no container engine: there is no `docker`"
    if done.returncode != 0:
        return f"no container engine: `docker compose` says: {done.stderr.splitlines()[0]}"
    return None


class Compose:
    """One project of `docker compose` with its own port.

    Args:
        files: Compose files, relative to the root of the repository.
        model: Directory of a world-readable checkpoint; None for the demo model of the image.
    """

    def __init__(self, *files: str, model: Path | None = None) -> None:
        port = free_port()
        self.project = f"eaas-test-{os.getpid()}-{port}"
        self.endpoint = f"http://127.0.0.1:{port}"
        self._files = [word for name in files for word in ("-f", name)]
        self._environment = os.environ | {"PORT": str(port)}
        if model is not None:
            self._environment["MODEL_DIR"] = str(model)

    def __call__(self, *arguments: str, timeout_s: float = _CALL_S) -> str:
        """Run `docker compose` with these arguments; return its output."""
        return self._run(
            ["docker", "compose", "-p", self.project, *self._files, *arguments], timeout_s
        )

    def docker(self, *arguments: str) -> str:
        """Run `docker` with these arguments; return its output."""
        return self._run(["docker", *arguments], _CALL_S)

    def _run(self, command: list[str], timeout_s: float) -> str:
        return output_of(*command, timeout_s=timeout_s, env=self._environment, cwd=ROOT)

    def up(self, *options: str) -> None:
        """Start the services and wait until all are healthy."""
        try:
            self("up", "--wait", *options, timeout_s=_UP_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self('logs', '--tail', '20')}") from None

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self("ps", "--quiet", service).split()

    def server_name(self, container: str) -> str:
        """The cluster's name for an expert server's container."""
        return f"expert-server-{container[:12]}"

    def inspect(self, container: str, path: str) -> Any:
        """A value of `docker inspect`."""
        return json.loads(self.docker("inspect", "--format", f"{{{{json {path}}}}}", container))

    def status(self) -> dict[str, Any]:
        """The document of `eaas status`."""
        answer = httpx.get(f"{self.endpoint}/eaas/v1/status", timeout=10)
        document: dict[str, Any] = answer.raise_for_status().json()
        return document

    def servers(self) -> dict[str, dict[str, Any]]:
        """The expert servers in `eaas status`, by id."""
        members = self.status()["members"]
        return {m["id"]: m for m in members if m["role"] == "expert-server"}

    def busy_s(self) -> dict[str, float]:
        """Busy seconds of each expert server."""
        text = httpx.get(f"{self.endpoint}/metrics", timeout=10).raise_for_status().text
        found = re.findall(
            r'^eaas_expert_server_busy_seconds_total{server="(.+)"} (\S+)$', text, re.MULTILINE
        )
        return {name: float(seconds) for name, seconds in found}

    def left(self) -> list[str]:
        """Containers, networks and volumes of this project that still exist."""
        mark = f"label=com.docker.compose.project={self.project}"
        kinds = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [
            line for kind in kinds for line in self.docker(*kind, "-q", "-f", mark).splitlines()
        ]


until = functools.partial(eventually, patience_s=PATIENCE_S)

SERVICES = {"attention-client": 1, "balancer": 1, "expert-server": 3, "monitor": 1}


@pytest.fixture(scope="module")
def engine() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[], Path]) -> Path:
    """A float32 checkpoint (answers must be equal) that the containers' user may read."""
    path = checkpoint()
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    return path


@contextlib.contextmanager
def cluster(*more: str, model: Path | None = None) -> Iterator[Compose]:
    """A healthy cluster that leaves nothing behind."""
    compose = Compose("compose.yaml", *more, "tests/compose/patient.yaml", model=model)
    try:
        compose.up("--build")
        yield compose
    finally:
        compose("down", "--volumes")
    assert compose.left() == []


# -- out of the box: the demo model of the image ---------------------------------------------------


def test_as_it_comes() -> None:
    with cluster() as compose:
        readme = (ROOT / "README.md").read_text()
        (line,) = re.findall(r"^curl .*/v1/chat/completions [^`]*?'$", readme, re.MULTILINE)
        line = line.replace("http://127.0.0.1:8000", compose.endpoint)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"finish_reason":"length"' in done.stdout


# -- one cluster for these tests, in this order ------------------------------------------------


@pytest.fixture(scope="module")
def compose(engine: None, model: Path) -> Iterator[Compose]:
    with cluster(model=model) as compose:
        yield compose


@pytest.fixture
def load(compose: Compose) -> Load:
    return Load(compose.endpoint, STREAMS, TOKENS)


def test_everything_is_healthy(compose: Compose) -> None:
    for service, containers in SERVICES.items():
        health = [compose.inspect(c, ".State.Health.Status") for c in compose.containers(service)]
        assert health == ["healthy"] * containers, service
    assert compose.status()["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 2}
    names = {compose.server_name(c) for c in compose.containers("expert-server")}
    assert compose.servers().keys() == names
    addresses = [m["address"] for m in compose.status()["members"]]
    assert len(addresses) == 6
    connect = (
        "import socket, sys; [socket.create_connection(a.split(':'), 9) for a in sys.argv[1:]]"
    )
    compose("exec", "-T", "balancer", "python", "-c", connect, *addresses)


def test_the_page(compose: Compose) -> None:
    """It loads from the container alone, answers a chat, and shows no operator's buttons."""
    with chromium() as browser, open_page(browser, compose.endpoint) as watched:
        for name in compose.servers():
            watched.part("members").locator("tr", has_text=name).wait_for()
        watched.page.get_by_label("Max tokens").fill("8")
        watched.page.get_by_label("Message").fill("And the king said")
        watched.page.get_by_role("button", name="Send", exact=True).click()
        watched.part("answer").locator("[data-servers]").first.wait_for()
        assert not watched.part("operate-status").is_visible()
        assert watched.page.get_by_role("button", name=re.compile("Kill|Scale")).count() == 0
        assert watched.hosts == {urlsplit(compose.endpoint).netloc}
        assert watched.complaints == []


def test_the_image_can_send_traces(compose: Compose) -> None:
    start = (
        "from eaas.config import ClusterConfig; from eaas.telemetry import start_tracing; "
        "print(start_tracing(ClusterConfig().telemetry, 'expert-server', 'x') is not None)"
    )
    switch = ("--env", "EAAS_TELEMETRY__TRACES=true")
    assert compose("exec", "-T", *switch, "expert-server", "python", "-c", start) == "True\n"


def test_what_a_container_may_do(compose: Compose) -> None:
    def shell(service: str, command: str) -> str:
        return compose("exec", "-T", service, "sh", "-c", command).strip()

    for service in SERVICES:
        assert shell(service, "id -u") == "10001"
        assert shell(service, "command -v gcc cc || echo no compiler") == "no compiler"
        assert shell(service, "grep CapEff /proc/1/status").endswith("\t0000000000000000")
    for service in ("expert-server", "attention-client"):
        for place in ("/models/demo", "/opt/eaas", "~"):
            refused = shell(service, f"touch {place}/x 2>&1 || true")
            assert refused.endswith("Read-only file system"), place
    (published,) = compose("port", "attention-client", "8000").split()
    assert published.startswith("127.0.0.1:")


def test_a_container_that_is_killed(compose: Compose, load: Load) -> None:
    victim = compose.containers("expert-server")[0]
    name = compose.server_name(victim)
    before = compose.servers()[name]
    with load.running():
        compose.docker("kill", victim)
        until(lambda: compose.servers()[name]["state"] == "DEAD")
        assert compose.status()["coverage"] == {"uncovered": [], "min_replicas": 1, "min_nodes": 1}
        load.some_more()
        # It has the same name, so it gets the same experts.
        compose.docker("start", victim)
        until(lambda: compose.servers()[name]["state"] == "SERVING")
        until(lambda: compose.status()["coverage"]["min_replicas"] == 2)
    now = compose.servers()[name]
    assert now["incarnation"] == before["incarnation"] + 1
    assert now["experts"] == before["experts"]
    assert len(compose.servers()) == 3


def test_the_monitor_starts_again(compose: Compose, load: Load) -> None:
    before = {name: m["incarnation"] for name, m in compose.servers().items()}
    with load.running():
        compose("restart", "monitor")
        (monitor,) = compose.containers("monitor")
        until(lambda: compose.inspect(monitor, ".State.Health.Status") == "healthy")
        load.some_more()
    # It kept its store: every incarnation continues.
    assert {name: m["incarnation"] for name, m in compose.servers().items()} == before


def test_more_servers_and_fewer(compose: Compose, load: Load) -> None:
    first = set(compose.servers())
    with load.running():
        compose.up("--no-recreate", "--scale", "expert-server=5")
        assert len(compose.containers("expert-server")) == 5

        def all_hold_experts() -> bool:
            servers = compose.servers().values()
            return len(servers) == 5 and all(m["experts"] > 0 for m in servers)

        until(all_hold_experts)
        new = compose.servers().keys() - first
        assert len(new) == 2
        before = compose.busy_s()
        until(lambda: all(compose.busy_s()[name] > before[name] + 0.1 for name in new))

        # Compose removes the newest; each hands its experts over before it ends.
        compose.up("--no-recreate", "--scale", "expert-server=3")
        alive = {
            name for name, m in compose.servers().items() if m["state"] not in ("DEAD", "LEFT")
        }
        assert alive == first
    assert compose.status()["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 2}


def test_a_client_that_waits_for_experts_ends_at_once(compose: Compose) -> None:
    """The first process of a container gets no signal that it does not handle."""
    name = f"{compose.project}-waiting"
    command = (
        "exec 2>&1; eaas monitor --port 7000 & "
        "exec eaas attention-client --model /models/demo --join 127.0.0.1:7000"
    )
    model = f"{compose.project}_demo-model:/models/demo:ro"
    image = "expert-as-a-service:local"
    compose.docker("run", "-d", "--name", name, "-v", model, image, "sh", "-c", command)
    try:
        until(lambda: "JOINING: registered" in compose.docker("logs", name))
        began = time.monotonic()
        compose.docker("stop", "-t", "30", name)
        assert time.monotonic() - began < 15
        assert compose.inspect(name, ".State.ExitCode") == 128 + signal.SIGTERM
    finally:
        compose.docker("rm", "--force", name)


def test_the_end(compose: Compose) -> None:
    containers = [c for service in SERVICES for c in compose.containers(service)]
    compose("stop")
    assert [compose.inspect(c, ".State.ExitCode") for c in containers] == [0] * len(containers)
    assert compose.left()
    compose("down", "--volumes")
    assert compose.left() == []


# -- shared memory --------------------------------------------------------------------------------------


def test_shared_memory(model: Path) -> None:
    with cluster("deploy/compose.shm.yaml", model=model) as compose:
        look = "import glob; print(*(open(f).read() for f in glob.glob('/proc/[0-9]*/maps')))"
        maps = compose("exec", "-T", "attention-client", "python", "-c", look)
        # Device and inode, since each container has its own /dev/shm.
        arenas = [tuple(line.split()[3:5]) for line in maps.splitlines() if "/dev/shm/" in line]
        # Each arena is mapped by its server and by the client.
        assert len(set(arenas)) == 3
        assert all(arenas.count(arena) >= 2 for arena in arenas)
        load = Load(compose.endpoint, STREAMS, TOKENS)
        with load.running():
            victim = compose.containers("expert-server")[0]
            compose.docker("kill", victim)
            until(lambda: compose.servers()[compose.server_name(victim)]["state"] == "DEAD")
            load.some_more()
            compose.docker("start", victim)
            until(lambda: compose.status()["coverage"]["min_replicas"] == 2)

"""A Ray cluster over hosts that are namespaces, and a cluster of the project on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from eaas_cli.certificates import write_certificates
from hosts import Host, Hosts, run_all
from waiting import eventually

__all__ = ["RayHosts"]

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_EAAS = [sys.executable, "-m", "eaas_cli"]
_KEY = "a-key-for-the-tests"
_START_S = 240.0
_PORT = 6379
_MOUNTS = "mkdir -p /tmp/ray; for d in /dev/shm /tmp/ray; do mount -t tmpfs tmpfs $d; done"
_CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo"


class RayHosts:
    """Hosts with Ray, of which the first one is the head. The last one runs `eaas up`, and so the endpoint.

    Args:
        directory: For certificates, keys and logs; all hosts see it.
        count: Number of hosts.
        redis: Starts a Redis server at an address of this machine, in which Ray keeps its state, and returns
            host:port; None: Ray's head keeps it in memory.

    Attributes:
        headers: HTTP headers of requests.
    """

    def __init__(
        self, directory: Path, count: int, redis: Callable[[str], str] | None = None
    ) -> None:
        self._directory = directory
        self._tls, self._keys = directory / "tls", directory / "keys"
        write_certificates(self._tls, days=1)
        self._keys.write_text(_KEY + "\n")
        self._keys.chmod(0o600)
        self.headers = {"Authorization": f"Bearer {_KEY}"}
        self._environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Not the token of the user who runs the test.
            "RAY_AUTH_MODE": "disabled",
            "EAAS_ATTENTION_CLIENT__COMPILE": "false",
            "EAAS_ATTENTION_CLIENT__CACHE_BLOCKS": "256",
            "EAAS_ATTENTION_CLIENT__THREADS": "1",
            "EAAS_FRONTEND__DASHBOARD": "false",
            # A host that is gone does not come back here.
            "EAAS_BALANCER__DEAD_GRACE_S": "10",
            "OMP_NUM_THREADS": "1",
        }
        # A Ray cluster that runs this test must not be found.
        os.environ.pop("RAY_ADDRESS", None)
        self.world = Hosts(count, _MOUNTS)
        self.endpoint = ""
        self._head_environment: dict[str, str] = {}
        try:
            if redis is not None:
                self._head_environment["RAY_REDIS_ADDRESS"] = redis(self.world.gateway)
            self._start_head()
            run_all([self.join(host) for host in self.world.hosts[1:]], _START_S)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Host:
        """The host of Ray's head."""
        return self.world.hosts[0]

    @property
    def home(self) -> Host:
        """The host of the endpoint."""
        return self.world.hosts[-1]

    def _start_head(self) -> None:
        where = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        run_all([self._start_ray(self.head, where, self._head_environment)], _START_S)

    def replace_head(self) -> None:
        """Start another machine in the place of the head, whose disk is empty, and Ray on it."""
        self.world.hosts[0] = self.world.new(1)
        self._start_head()

    def join(self, host: Host) -> subprocess.Popen[bytes]:
        """Start Ray on another host; does not wait."""
        return self._start_ray(host, [f"--address={self.head.address}:{_PORT}"])

    def _start_ray(
        self, host: Host, where: list[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._directory / f"ray-{host.name}.log").open("ab") as log:
            return subprocess.Popen(
                host.words(
                    *_RAY,
                    *("start", *where, f"--node-ip-address={host.address}", "--num-cpus=2"),
                    *("--object-store-memory=80000000", "--disable-usage-stats"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment | dict(environment or {}),
            )

    def up(self, servers: int, *options: str) -> None:
        """Start the project's cluster with two replicas of each expert."""
        self.eaas(
            *("up", "--on", "ray", "--model", str(_CHECKPOINT), "--servers", str(servers)),
            *("--tls", str(self._tls), "--api-key-file", str(self._keys), *options),
        )
        self.endpoint = f"http://{self.home.address}:8000"

    def eaas(self, *words: str, timeout_s: float = _START_S) -> str:
        """Run a command of the program on the host of the endpoint; return its output."""
        return self.home.check(*_EAAS, *words, environment=self._environment, timeout_s=timeout_s)

    def scale(self, servers: int) -> None:
        """Change the number of expert servers."""
        self.eaas(
            *("scale", str(servers), "--endpoint", self.endpoint),
            *("--tls", str(self._tls), "--api-key-file", str(self._keys)),
        )

    def status(self) -> dict[str, Any]:
        """The status document; empty if the endpoint does not answer in time."""
        try:
            answer = httpx.get(f"{self.endpoint}/eaas/v1/status", headers=self.headers, timeout=5.0)
            document: dict[str, Any] = answer.raise_for_status().json()
        except httpx.HTTPError:
            return {}
        return document

    def live_servers(self) -> list[dict[str, Any]]:
        """Expert servers that serve."""
        members = self.status().get("members", [])
        return [m for m in members if m["role"] == "expert-server" and m["state"] == "SERVING"]

    def wait_whole(self, servers: int, patience_s: float = 60.0) -> None:
        """Wait until so many servers serve and each expert has two live replicas."""

        def whole() -> bool:
            coverage = self.status().get("coverage", {})
            return len(self.live_servers()) >= servers and coverage.get("min_replicas", 0) >= 2

        eventually(whole, patience_s, what=f"two replicas on {servers} servers")

    def member(self, role: str) -> tuple[str, int]:
        """Address and process id of the only member of a role that serves; nothing while there is none."""
        for member in self.status().get("members", []):
            if member["role"] == role and member["state"] == "SERVING":
                return member["address"], member["pid"]
        return "", 0

    def wait_replaced(self, role: str, former: tuple[str, int], patience_s: float = 60.0) -> None:
        """Wait until a role has another process, which serves."""
        eventually(
            lambda: self.member(role) not in (former, ("", 0)), patience_s, what=f"another {role}"
        )

    def host_of(self, member: Mapping[str, Any]) -> Host:
        """The host of a member."""
        address = str(member["address"]).partition(":")[0]
        return next(host for host in self.world.hosts if host.address == address)

    def roles(self) -> list[int]:
        """Processes of roles on all hosts, by ids of this machine."""
        return [pid for host in self.world.hosts for pid in host.pids("eaas_cli.ray.child")]

    def process_of(self, member: str) -> int:
        """Process id, on this machine, of a member."""
        word = f"--id {member} " if member.startswith("expert-server") else f" {member} "
        (pid,) = [p for h in self.world.hosts for p in h.pids("eaas_cli.ray.child", word)]
        return pid

    def actors_of(self, member: str) -> list[int]:
        """Ray's workers, by ids of this machine, that are the actor of a member."""
        if member == "controller":
            return [p for h in self.world.hosts for p in h.pids("ray::ControllerActor")]
        # Its process is a child of the actor.
        status = Path(f"/proc/{self.process_of(member)}/status").read_text()
        return [int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")]

    def log(self) -> str:
        """The logs of `ray start`."""
        return "\n".join(p.read_text() for p in self._directory.glob("ray-*.log"))

    def close(self) -> None:
        """End all hosts."""
        self.world.close()

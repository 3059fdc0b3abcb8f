"""A cluster of containers, and a load that checks its answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx

from helper_process import output_of
from service_box import free_port

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

"""A local cluster that can be attacked: its monitor comes back at its address, its first server has a network
of its own where there can be one, and a server's next life may find shared memory full.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from eaas.chaos.census import birth
from eaas.chaos.child import VARIABLE
from eaas.chaos.network import Namespace
from eaas.config import load_config
from eaas.local import LocalCluster
from eaas.local.nursery import Nursery
from eaas.local.process import ChildProcess

__all__ = ["DAMAGED", "ChaosCluster", "free_port"]

DAMAGED = "damaged-copy"
"""Name of the server that must not serve."""

# Below the range of ports that the kernel hands out to whoever asks for any.
_PORTS = range(20_000, 32_000)


def free_port(host: str) -> int:
    """One that nobody listens on, and nobody is given for now."""
    first = os.getpid() % len(_PORTS)
    for i in range(len(_PORTS)):
        port = _PORTS[(first + i) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


class ChaosCluster(LocalCluster):
    """See the module's head.

    Args:
        model: Checkpoint.
        servers: Expert servers.
        redundancy: Servers that hold each expert.
        transport: shm, grpc or nixl.
        scratch: Directory for settings and logs.
        namespace: The first server's network; None: it has that of the others.
        nursery: Forks the processes.
    """

    def __init__(
        self,
        model: Path,
        *,
        servers: int,
        redundancy: int,
        transport: str,
        scratch: Path,
        namespace: Namespace | None,
        nursery: Nursery,
    ) -> None:
        host = namespace.monitor_host if namespace else "127.0.0.1"
        settings: dict[str, Any] = {
            "monitor": {
                "host": host,
                "port": free_port(host),
                "data_dir": str(scratch / "monitor"),
            }
        }
        if namespace:
            # Its address is not loopback, though nobody else can reach it.
            settings["security"] = {"insecure": True}
        file = scratch / "cluster.yaml"
        file.write_text(yaml.safe_dump(settings))
        super().__init__(
            model,
            servers=servers,
            redundancy=redundancy,
            config=load_config(file, attention_client={"transport": transport, "port": 0}),
            config_file=file,
            log_dir=scratch / "logs",
            nursery=nursery,
        )
        self._namespace = namespace
        # The run writes this copy before it starts a server on it.
        self.damaged_model = scratch / "damaged"
        # Of every process that was started here, by pid.
        self.births: dict[int, int | None] = {}
        # Surroundings of a process's next life.
        self.shared_memory: dict[str, int] = {}
        self._hidden: set[str] = set()

    def server_name(self, number: int) -> str:
        """Of an expert server."""
        return f"expert-server-{number}"

    def add_numbered(self, number: int) -> ChildProcess:
        """Start one more server, of this number; does not wait for it."""
        return self._spawn_server(number)

    def add_damaged(self) -> ChildProcess:
        """Start one more server, on the damaged copy of the checkpoint; does not wait for it."""
        words = ("expert-server", "--id", DAMAGED, "--join", self.monitor_address)
        return self._spawn(DAMAGED, *words, "--model", str(self.damaged_model), "--threads", "1")

    def add_unreachable(self) -> ChildProcess:
        """Start one more server, whose memory no client finds, as in another container; does not wait for it.

        It is none of the numbered ones, which are all to serve.
        """
        name = "unreachable-server"
        self._hidden.add(name)
        role = ("expert-server", "--id", name, "--model", str(self.model))
        return self._spawn(name, *role, "--join", self.monitor_address, "--threads", "1")

    def _launch(self, name: str, arguments: Sequence[str], module: str = "eaas") -> ChildProcess:
        child = super()._launch(name, arguments, module)
        self.births[child.pid] = birth(child.pid)
        return child

    def _start(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        wanted: dict[str, object] = {}
        if self._namespace is not None and name == self.server_name(0):
            wanted["network"] = self._namespace.path
            arguments = tuple(arguments)
            if "--host" not in arguments:
                arguments = (*arguments, "--host", self._namespace.server_host)
        if (size := self.shared_memory.pop(name, None)) is not None:
            wanted["shared_memory"] = size
        if name in self._hidden:
            wanted["processes"] = True
        if not wanted:
            return super()._start(name, arguments)
        os.environ[VARIABLE] = json.dumps(wanted)
        try:
            return self._launch(name, arguments, "eaas.chaos.child")
        finally:
            del os.environ[VARIABLE]

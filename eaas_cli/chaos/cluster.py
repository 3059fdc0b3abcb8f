"""In the launcher of `eaas chaos run`: the local cluster that gets the faults.

Its monitor restarts at the same address. Its first server has its own network, if the system allows it. A
restarted server may find shared memory full.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from eaas.config import load_config
from eaas_cli.chaos.child import VARIABLE
from eaas_cli.chaos.network import Namespace
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.interface import SERVER
from eaas_cli.local.process import ChildProcess

__all__ = ["CACHE_BLOCKS", "CLIENT_COUNT", "DAMAGED", "ChaosCluster", "free_port"]

DAMAGED = "damaged-copy"
"""Name of the server with the damaged checkpoint, which must not serve."""

# These ports lie below the kernel's ephemeral ports.
_PORTS = range(20_000, 32_000)


def free_port(host: str) -> int:
    """Find a free port that is not ephemeral, for a monitor that restarts at the same address."""
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


CACHE_BLOCKS = 64
"""Blocks of each attention client's key-value cache."""
CLIENT_COUNT = 2
"""Attention clients: when one is lost, the other one goes on with its requests."""


class ChaosCluster(LocalCluster):
    """The local cluster of a chaos run; see the module docstring.

    `namespace`: network of the first server; None: that of the others.
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
        fork_server: ForkServer,
    ) -> None:
        host = namespace.monitor_host if namespace else "127.0.0.1"
        settings: dict[str, Any] = {
            "monitor": {
                "host": host,
                "port": free_port(host),
                "data_dir": str(scratch / "monitor"),
            },
            # The cache is filled before memory is compared, and nothing else may grow later.
            "attention_client": {"cache_blocks": CACHE_BLOCKS, "compile": False},
        }
        if namespace:
            # The address is not loopback, although only this machine reaches it.
            settings["security"] = {"insecure": True}
        file = scratch / "cluster.yaml"
        file.write_text(yaml.safe_dump(settings))
        super().__init__(
            model,
            servers=servers,
            redundancy=redundancy,
            clients=CLIENT_COUNT,
            config=load_config(
                file, attention_client={"transport": transport}, frontend={"port": 0}
            ),
            config_file=file,
            log_dir=scratch / "logs",
            fork_server=fork_server,
        )
        self._namespace = namespace
        # `run` writes this copy before it starts a server on it.
        self.damaged_model = scratch / "damaged"
        # Bytes of /dev/shm for the next start of a process, by name.
        self.shared_memory: dict[str, int] = {}
        self._hidden: set[str] = set()

    def add_numbered(self, number: int) -> ChildProcess:
        """Start an additional expert server with this number, for the fault "scale"; does not wait for it."""
        return self._spawn_server(number)

    def add_damaged(self) -> ChildProcess:
        """Start an expert server on the damaged copy of the checkpoint; does not wait for it.

        It must find the damage and end without serving.
        """
        words = ("expert-server", "--id", DAMAGED, "--join", self.monitor_address)
        return self._spawn(DAMAGED, *words, "--model", str(self.damaged_model), "--threads", "1")

    def add_unreachable(self) -> ChildProcess:
        """Start an expert server whose memory no client can map, as in another container.

        Does not wait for it. It has no number, because all numbered servers must serve.
        """
        name = "unreachable-server"
        self._hidden.add(name)
        role = ("expert-server", "--id", name, "--model", str(self.model))
        return self._spawn(name, *role, "--join", self.monitor_address, "--threads", "1")

    def _start(self, name: str, arguments: Sequence[str], module: str = "eaas_cli") -> ChildProcess:
        isolation: dict[str, object] = {}
        if self._namespace is not None and name == f"{SERVER}0":
            isolation["network"] = self._namespace.path
            arguments = tuple(arguments)
            if "--host" not in arguments:
                arguments = (*arguments, "--host", self._namespace.server_host)
        if (size := self.shared_memory.pop(name, None)) is not None:
            isolation["shared_memory"] = size
        if name in self._hidden:
            isolation["processes"] = True
        if not isolation:
            return super()._start(name, arguments, module)
        os.environ[VARIABLE] = json.dumps(isolation)
        try:
            return super()._start(name, arguments, "eaas_cli.chaos.child")
        finally:
            del os.environ[VARIABLE]

"""A program of another project that runs beside a test."""

from __future__ import annotations

import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from waiting import eventually

__all__ = ["RedisBox", "ServiceBox", "free_port"]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class ServiceBox(ABC):
    """Runs a command until `stop`.

    Args:
        log: File for its output.
        command: The program and its arguments.
    """

    def __init__(self, log: Path, command: Sequence[str]) -> None:
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )
        try:
            eventually(lambda: self.process.poll() is not None or self.is_ready(), what=command[0])
            assert self.process.poll() is None, log.read_text()
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers."""

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class RedisBox(ServiceBox):
    """Redis without a file, at an address of this machine.

    Attributes:
        address: host:port.
    """

    def __init__(self, directory: Path, host: str) -> None:
        self._host, self._port = host, free_port()
        self.address = f"{host}:{self._port}"
        options = ("--bind", host, "--port", str(self._port), "--save", "", "--dir", str(directory))
        super().__init__(
            directory / "redis.log", ["redis-server", *options, "--protected-mode", "no"]
        )

    def is_ready(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

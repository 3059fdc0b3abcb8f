"""A real ZooKeeper of one process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["ZooKeeperBox", "missing"]

# From Debian's package `zookeeper`, which starts no service.
_JAR = Path("/usr/share/java/zookeeper.jar")
_TICK_MS = 500
_START_S = 60.0


def missing() -> str | None:
    """Why no ZooKeeper can run here; None if it can."""
    if shutil.which("java") is None or not _JAR.exists():
        return "needs ZooKeeper: apt-get install zookeeper"
    return None


class ZooKeeperBox:
    """A ZooKeeper that runs until `stop`, with sessions of 1 s to 10 s."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.hosts = f"127.0.0.1:{port}"
        directory.mkdir()
        config = directory / "zoo.cfg"
        config.write_text(
            f"tickTime={_TICK_MS}\ndataDir={directory}\nclientPort={port}\n"
            "clientPortAddress=127.0.0.1\nminSessionTimeout=1000\nadmin.enableServer=false\n"
            "4lw.commands.whitelist=ruok\n"
        )
        self._log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *("java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", str(_JAR)),
                *("org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )
        try:
            self._wait(port)
        except BaseException:
            self.stop()
            raise

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + _START_S
        while not _is_well(port):
            assert time.monotonic() < deadline, "ZooKeeper did not start"
            assert self.process.poll() is None, "ZooKeeper ended"
            time.sleep(0.05)

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def _is_well(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
            line.sendall(b"ruok")
            return line.recv(4) == b"imok"
    except OSError:
        return False

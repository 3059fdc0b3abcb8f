"""A real ZooKeeper of one process."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

from service_box import ServiceBox, free_port

__all__ = ["ZooKeeperBox", "missing"]

# From Debian's package `zookeeper`, which starts no service.
_JAR = Path("/usr/share/java/zookeeper.jar")
_TICK_MS = 500


def missing() -> str | None:
    """Why no ZooKeeper can run here; None if it can."""
    if shutil.which("java") is None or not _JAR.exists():
        return "needs ZooKeeper: apt-get install zookeeper"
    return None


class ZooKeeperBox(ServiceBox):
    """A ZooKeeper that runs until `stop`, with sessions of 1 s to 10 s."""

    def __init__(self, directory: Path) -> None:
        self._port = free_port()
        self.hosts = f"127.0.0.1:{self._port}"
        directory.mkdir()
        config = directory / "zoo.cfg"
        config.write_text(
            f"tickTime={_TICK_MS}\ndataDir={directory}\nclientPort={self._port}\n"
            "clientPortAddress=127.0.0.1\nminSessionTimeout=1000\nadmin.enableServer=false\n"
            "4lw.commands.whitelist=ruok\n"
        )
        super().__init__(
            directory / "log",
            [
                *("java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", str(_JAR)),
                *("org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)),
            ],
        )

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as line:
                line.sendall(b"ruok")
                return line.recv(4) == b"imok"
        except OSError:
            return False

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

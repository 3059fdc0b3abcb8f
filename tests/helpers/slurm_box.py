"""A Slurm cluster on this machine, whose nodes are namespaces (`hosts`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from helper_process import output_of
from hosts import Host, Hosts, why_no_hosts
from waiting import eventually

__all__ = ["SlurmBox", "processes_of", "why_not"]

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

"""A Slurm cluster on this machine: a node is a set of namespaces, with its own address and processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import eventually

__all__ = ["Node", "SlurmBox", "why_not"]

_PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare", "nsenter", "ip")
_CALL_S = 60.0
_NETWORK = "10.99.0"
_BRIDGE = "slurmtest0"

# The first process of a node. /tmp, /dev/shm and /run are its own, except `shared`.
_INIT = """
hostname {name}
mount --make-rprivate /
mount -t proc proc /proc
mkdir -p {box}/keep && mount --bind {shared} {box}/keep
for d in /tmp /dev/shm /run; do mount -t tmpfs tmpfs $d; done
mkdir -p {shared} && mount --bind {box}/keep {shared}
mount --bind {box}/hosts /etc/hosts
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add {address}/24 dev eth0
ip link set eth0 up
touch {box}/{name}.up
while :; do sleep 1000 & wait $!; done
"""

_CONF = """
ClusterName=test
SlurmctldHost={host}({network}.254)
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
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm, iproute2)" if missing else None


class Node:
    """One node.

    Attributes:
        init: The process whose end is that of all others on the node.
    """

    def __init__(self, name: str, address: str, unshare: subprocess.Popen[bytes]) -> None:
        self.name, self.address = name, address
        self._unshare = unshare
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
        self.init = int(eventually(children.read_text, _CALL_S, "the node's first process"))

    def argv(self, *command: str) -> list[str]:
        """The command line that runs a command on the node, seen from the machine."""
        spaces = ("--net", "--pid", "--mount", "--uts", "--ipc")
        return ["nsenter", "-t", str(self.init), *spaces, "--", *command]

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of a command on the node; a failure is the test's."""
        return _output(self.argv(*command), environment)

    def processes(self, pattern: str) -> list[str]:
        """Ids, on the node, of the processes whose command line matches."""
        listed = (
            line.split(maxsplit=1)
            for line in self.run("ps", "axww", "-o", "pid=,args=").splitlines()
        )
        return [pid for pid, line in listed if re.search(pattern, line)]

    def kill(self) -> None:
        """End every process of the node at once, and its network."""
        if self._unshare.poll() is None:
            os.kill(self.init, signal.SIGKILL)
        self._unshare.wait(_CALL_S)


class SlurmBox:
    """slurmctld on the machine, slurmd on each node, one munged for all.

    Attributes:
        directory: Every node sees it; it is removed at the end.

    Args:
        shared: Directory that every node sees, too, although it may be in `/tmp`, which is each node's own.
        nodes: Number of nodes; the last one is under another switch (rack) than the others.
        cores: CPUs that each node claims to have.
    """

    def __init__(self, shared: Path, nodes: int = 3, cores: int = 4) -> None:
        self._shared = shared
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
        self._stack = contextlib.ExitStack()
        self.nodes: list[Node] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._start(nodes, cores)
            undo.pop_all()

    def _start(self, nodes: int, cores: int) -> None:
        box = self.directory
        self._stack.callback(shutil.rmtree, box, ignore_errors=True)
        self._munge(box / "munge")
        (box / "state").mkdir()
        names = [f"node{n}" for n in range(1, nodes + 1)]
        addresses = [f"{_NETWORK}.{n}" for n in range(1, nodes + 1)]
        conf = [_CONF.format(network=_NETWORK, box=box, host=socket.gethostname())]
        conf += [
            f"NodeName={name} NodeAddr={address} CPUs={cores} State=UNKNOWN"
            for name, address in zip(names, addresses, strict=True)
        ]
        conf.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO")
        (box / "slurm.conf").write_text("\n".join(conf) + "\n")
        (box / "topology.conf").write_text(
            f"SwitchName=rack1 Nodes={','.join(names[:-1])}\nSwitchName=rack2 Nodes={names[-1]}\n"
            "SwitchName=top Switches=rack1,rack2\n"
        )
        hosts = [f"{a} {n}" for a, n in zip(addresses, names, strict=True)]
        (box / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        self.environment = os.environ | {"SLURM_CONF": str(box / "slurm.conf")}

        _ip("link", "add", _BRIDGE, "type", "bridge")
        self._stack.callback(_ip, "link", "del", _BRIDGE)
        _ip("addr", "add", f"{_NETWORK}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        daemon = subprocess.Popen(
            ["slurmctld", "-D"], env=self.environment, stderr=subprocess.DEVNULL
        )
        self._stack.callback(daemon.wait, _CALL_S)
        self._stack.callback(daemon.terminate)
        for name, address in zip(names, addresses, strict=True):
            (box / f"spool-{name}").mkdir()
            self.nodes.append(self._node(name, address))
        self.wait_for_nodes("idle", *names)

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
        # fmt: off
        daemon = subprocess.Popen([
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={place / 'socket'}",
            f"--pid-file={place / 'pid'}", f"--log-file={place / 'log'}", f"--seed-file={place / 'seed'}",
        ], stderr=subprocess.DEVNULL)
        # fmt: on
        self._stack.callback(daemon.wait, _CALL_S)
        self._stack.callback(daemon.terminate)
        eventually((place / "socket").exists, _CALL_S, "munged")

    def _node(self, name: str, address: str) -> Node:
        script = _INIT.format(name=name, address=address, shared=self._shared, box=self.directory)
        up = self.directory / f"{name}.up"
        up.unlink(missing_ok=True)
        # fmt: off
        unshare = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child",
             "bash", "-ec", script],
            start_new_session=True, stdin=subprocess.DEVNULL,
        )
        # fmt: on
        node = Node(name, address, unshare)
        self._stack.callback(node.kill)
        cable = f"slurmtest{address.rpartition('.')[2]}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(node.init))
        _ip("link", "set", cable, "master", _BRIDGE, "up")
        eventually(up.exists, _CALL_S, name)
        node.run("slurmd", "-N", name, environment=self.environment)
        return node

    def start_again(self, index: int) -> None:
        """Start a node that was killed."""
        self.nodes[index] = self._node(self.nodes[index].name, self.nodes[index].address)

    def slurm(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands; a failure is the test's."""
        return _output(command, self.environment | dict(environment or {}))

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; of an ended job COMPLETED, CANCELLED, FAILED."""
        words = self.slurm("scontrol", "show", "job", job).split()
        (state,) = [w.partition("=")[2] for w in words if w.startswith("JobState=")]
        return state

    def close(self) -> None:
        """End every process and remove network and files. Idempotent."""
        self._stack.close()


def _output(command: Sequence[str], environment: Mapping[str, str] | None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def _ip(*words: str) -> None:
    # A namespace's end removes its cable a moment later.
    for _ in range(50):
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_CALL_S)
        if done.returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"ip {' '.join(words)}: {done.stderr}")

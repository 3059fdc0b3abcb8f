"""The actions of the dashboard's buttons, run by the attention client for a cluster of `eaas up`."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.events import moved
from eaas.control_plane.balancer_client import MOST_NUMBER, BalancerClient
from eaas.counted import counted
from eaas.errors import ClusterError
from eaas.launcher_pipe import has_same_launcher
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, Role

__all__ = ["Operator", "is_paused"]


class Operator:
    """Sends signals to expert servers of this machine and calls the balancer. Methods block for some seconds.

    Only processes of the same launcher get signals. Each method returns a message for the operator.

    Args:
        tls: The operator's certificate; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls

    def kill(self, server: Member) -> str:
        """Kill an expert server (SIGKILL), like a crash.

        Raises:
            ClusterError: Another launcher started the process, or it has ended. `pause` and
                `resume` also raise it.
        """
        _signal(server, signal.SIGKILL)
        return f"{server.id} (pid {server.pid}) was killed."

    def pause(self, server: Member) -> str:
        """Pause an expert server (SIGSTOP), like a hang: it becomes DEAD unless it is resumed in time."""
        _signal(server, signal.SIGSTOP)
        return f"{server.id} is paused: it does not answer until it is resumed."

    def resume(self, server: Member) -> str:
        """Resume a paused expert server (SIGCONT), even one that is DEAD meanwhile."""
        _signal(server, signal.SIGCONT)
        return f"{server.id} is resumed."

    def scale(self, snapshot: ClusterSnapshot, servers: float | None) -> str:
        """Ask the balancer for `servers` live expert servers; the launcher starts or ends servers.

        Raises:
            ClusterError: The number is invalid, or the balancer refuses or is unreachable. `start_server` and
                `rebalance` also raise it.
        """
        # The comparison is also false for NaN.
        if servers is None or not 1 <= servers <= MOST_NUMBER:
            raise ClusterError("enter the number of servers: 1 or more")
        servers = int(servers)
        with BalancerClient(_balancer(snapshot), self._tls) as client:
            client.scale(servers)
        return f"Scaling to {counted(servers, 'expert server')}."

    def start_server(self, snapshot: ClusterSnapshot) -> str:
        """Ask the balancer for one more expert server than are live; the launcher starts it."""
        return self.scale(snapshot, len(snapshot.live(Role.EXPERT_SERVER)) + 1)

    def rebalance(self, snapshot: ClusterSnapshot) -> str:
        """Let the balancer plan a placement now, and apply it if its gain exceeds its cost."""
        with BalancerClient(_balancer(snapshot), self._tls) as client:
            answer = client.rebalance()
        plan = answer.plan
        verdict = {
            pb.VERDICT_SHARES: "other shares, nothing moves",
            pb.VERDICT_MOVES: moved(plan.transit),
        }.get(plan.verdict, "nothing changes")
        change = f"PAR {plan.par_now:.2f} to {plan.par_then:.2f}"
        return f"{plan.policy}: {verdict}, {change}. {plan.reason}"


def is_paused(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP); its button then offers to resume it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the program's name, which may contain anything but ends with the last ")".
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


def _has_id(pid: int, server_id: str) -> bool:
    """Whether this process was started as the server of that id; otherwise it gets no signal."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return (b"--id", server_id.encode()) in pairwise(words)


def _signal(server: Member, number: signal.Signals) -> None:
    # A paused server becomes DEAD and can still be resumed.
    gone = server.state.is_gone and number is not signal.SIGCONT
    if server.role is not Role.EXPERT_SERVER or gone:
        raise ClusterError(f"{server.id} is not a live expert server")
    if server.host != socket.gethostname():
        raise ClusterError(f"{server.id} runs on {server.host}: end it there")
    process = f"{server.id} (pid {server.pid})"
    with ExitStack() as stack:
        try:
            # Open a handle before the check: the kernel may reuse the process id.
            handle = os.pidfd_open(server.pid)
            stack.callback(os.close, handle)
            if not has_same_launcher(server.pid):
                raise ClusterError(f"{process} was started by hand: end it in its own terminal")
            # A member reports its own pid. It must not name another process of the launcher.
            if not _has_id(server.pid, server.id):
                raise ClusterError(f"{process} is another process: nothing was sent to it")
            signal.pidfd_send_signal(handle, number)
        except OSError as error:
            raise ClusterError(f"{process}: {error.strerror}") from error
        except OverflowError as error:
            raise ClusterError(f"{process}: No such process") from error


def _balancer(snapshot: ClusterSnapshot) -> str:
    living = snapshot.live(Role.BALANCER)
    if not living:
        raise ClusterError(
            "no balancer lives in this cluster: start one with `eaas balancer --join`"
        )
    return living[0].address

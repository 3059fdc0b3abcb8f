"""The actions of the dashboard's buttons, run by the frontend for a cluster of `eaas up`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.events import moved
from eaas.control_plane.balancer_client import MOST_NUMBER, BalancerClient
from eaas.counted import counted
from eaas.errors import ClusterError
from eaas.launcher_pipe import has_same_launcher
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, Role

__all__ = ["Operator", "paused"]


# What a button does to a process, and what it says then.
_SIGNALS = {
    "kill": (signal.SIGKILL, "was killed."),
    "pause": (signal.SIGSTOP, "is paused: it does not answer until it is resumed."),
    "resume": (signal.SIGCONT, "is resumed."),
}


class Operator:
    """Does what the buttons ask for. A call blocks for some seconds and returns a message for the operator.

    It sends signals to expert servers and engines of this machine that the same launcher started, and calls
    the balancer.

    Args:
        tls: The operator's certificate; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls

    def act(self, snapshot: ClusterSnapshot, order: Mapping[str, Any]) -> str:
        """Kill, pause or resume a process; scale the cluster; let the balancer plan now.

        Args:
            snapshot: The cluster as the page shows it.
            order: "action", and its "servers" or its "member" with the "incarnation" that the page showed.

        Raises:
            ClusterError: It cannot be done: the number is invalid, the balancer refuses or is unreachable,
                another launcher started the process, or it has ended.
            ValueError: There is no such action.
        """
        match order:
            case {"action": "scale", "servers": int() | float() | None as servers}:
                return self._scale(snapshot, servers)
            case {"action": "rebalance"}:
                return self._rebalance(snapshot)
            case {"action": str(verb), "member": name, "incarnation": shown} if verb in _SIGNALS:
                found = (m.member for m in snapshot.members if m.member.id == name)
                member = next(found, None)
                # The confirmation is for the incarnation that the browser showed.
                if member is None or member.incarnation != shown:
                    raise ClusterError(f"{name} is gone or has restarted: nothing was done")
                number, result = _SIGNALS[verb]
                _signal(member, number)
                return f"{member.id} (pid {member.pid}) {result}"
        raise ValueError(f"no action: {str(order)[:200]}")

    def _scale(self, snapshot: ClusterSnapshot, servers: float | None) -> str:
        """Ask the balancer for `servers` live expert servers; the launcher starts or ends servers."""
        # The comparison is also false for NaN.
        if servers is None or not 1 <= servers <= MOST_NUMBER:
            raise ClusterError("enter the number of servers: 1 or more")
        with BalancerClient(_balancer(snapshot), self._tls) as client:
            client.scale(int(servers))
        return f"Scaling to {counted(int(servers), 'expert server')}."

    def _rebalance(self, snapshot: ClusterSnapshot) -> str:
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


def paused(snapshot: ClusterSnapshot) -> list[str]:
    """List the members on this machine that are stopped (SIGSTOP): a button resumes them."""
    here = socket.gethostname()
    return [
        m.member.id for m in snapshot.members if m.member.host == here and _is_paused(m.member.pid)
    ]


def _is_paused(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the program's name, which may contain anything but ends with the last ")".
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


def _has_id(pid: int, member_id: str) -> bool:
    """Whether this process was started as the member of that id; otherwise it gets no signal."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return (b"--id", member_id.encode()) in pairwise(words)


def _signal(member: Member, number: signal.Signals) -> None:
    # A paused process becomes DEAD and can still be resumed.
    gone = member.state.is_gone and number is not signal.SIGCONT
    if gone or not (member.role is Role.EXPERT_SERVER or member.engine_address):
        raise ClusterError(f"{member.id} is not a live expert server or engine")
    if member.host != socket.gethostname():
        raise ClusterError(f"{member.id} runs on {member.host}: end it there")
    process = f"{member.id} (pid {member.pid})"
    try:
        # Open a handle before the check: the kernel may reuse the process id.
        with open(os.pidfd_open(member.pid), "rb", buffering=0) as handle:
            if not has_same_launcher(member.pid):
                raise ClusterError(f"{process} was started by hand: end it in its own terminal")
            # A member reports its own pid. It must not name another process of the launcher.
            if not _has_id(member.pid, member.id):
                raise ClusterError(f"{process} is another process: nothing was sent to it")
            signal.pidfd_send_signal(handle.fileno(), number)
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

"""The actions of the page's buttons, for a cluster of `eaas up`."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.events import moved
from eaas.control_plane.balancer_calls import MOST_NUMBER, scale_servers
from eaas.control_plane.balancer_client import BalancerClient
from eaas.counted import counted
from eaas.errors import ClusterError
from eaas.launcher_pipe import has_same_launcher
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, Role

__all__ = ["Operator"]


class Operator:
    """Kills expert servers of this machine and calls the balancer. Methods block for some seconds.

    Each method returns a message for the operator.

    Args:
        tls: The operator's certificate; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls

    def kill(self, server: Member) -> str:
        """Kill a server (SIGKILL), like a crash.

        Raises:
            ClusterError: Another launcher started the process, or it has ended.
        """
        if server.role is not Role.EXPERT_SERVER or server.state.is_gone:
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
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except OSError as error:
                raise ClusterError(f"{process}: {error.strerror}") from error
            except OverflowError as error:
                raise ClusterError(f"{process}: No such process") from error
        return f"{process} was killed."

    def scale(self, snapshot: ClusterSnapshot, servers: float | None) -> str:
        """Let the launcher start or end servers until `servers` are live.

        Raises:
            ClusterError: The number is invalid, or the balancer refuses or is unreachable. The same for
                `rebalance`.
        """
        # The comparison is also false for NaN.
        if servers is None or not 1 <= servers <= MOST_NUMBER:
            raise ClusterError("enter the number of servers: 1 or more")
        servers = int(servers)
        scale_servers(_balancer(snapshot), servers, self._tls)
        return f"Scaling to {counted(servers, 'expert server')}."

    def rebalance(self, snapshot: ClusterSnapshot) -> str:
        """Plan now and roll out the plan if it pays off."""
        with BalancerClient(_balancer(snapshot), self._tls) as client:
            answer = client.rebalance()
        plan = answer.plan
        verdict = {
            pb.VERDICT_SHARES: "other shares, nothing moves",
            pb.VERDICT_MOVES: moved(plan.transit),
        }.get(plan.verdict, "nothing changes")
        change = f"PAR {plan.par_now:.2f} to {plan.par_then:.2f}"
        return f"{plan.policy}: {verdict}, {change}. {plan.reason}"


def _balancer(snapshot: ClusterSnapshot) -> str:
    living = snapshot.live(Role.BALANCER)
    if not living:
        raise ClusterError(
            "no balancer lives in this cluster: start one with `eaas balancer --join`"
        )
    return living[0].address

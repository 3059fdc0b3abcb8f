"""What the page's buttons do to a cluster of `eaas up`."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from eaas.balancer_calls import MOST_NUMBER, scale_servers
from eaas.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas.facts import Facts
from eaas.facts.events import moved
from eaas.local.child import has_same_launcher
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.tls import Identity
from eaas.types import Member, Role
from eaas.words import counted

__all__ = ["Operator", "is_paused"]


class Operator:
    """Signals to expert servers of this machine, and calls of the balancer. Methods block for some seconds.

    Only processes that the same launcher has started are signalled.

    Args:
        tls: The operator's certificate; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls

    def kill(self, server: Member) -> str:
        """End a server at once, as a crash would. Returns what to tell people; so do the others.

        Raises:
            ClusterError: It is not one of this launcher's, or has ended. So do `pause` and `resume`.
        """
        _signal(server, signal.SIGKILL)
        return f"{server.id} (pid {server.pid}) was killed."

    def pause(self, server: Member) -> str:
        """Have a server stand still (SIGSTOP)."""
        _signal(server, signal.SIGSTOP)
        return f"{server.id} is paused: it answers nothing until it is resumed."

    def resume(self, server: Member) -> str:
        """Have a paused server go on (SIGCONT)."""
        _signal(server, signal.SIGCONT)
        return f"{server.id} is resumed."

    def scale(self, facts: Facts, servers: float | None) -> str:
        """Have the launcher start or end servers until there are so many.

        Raises:
            ClusterError: It is no number of servers, as of a field that was left empty; the balancer refuses,
                or cannot be reached. So do the others.
        """
        # Also false for NaN.
        if servers is None or not 1 <= servers <= MOST_NUMBER:
            raise ClusterError("say how many servers there are to be: 1 or more")
        servers = int(servers)
        scale_servers(_balancer(facts), servers, self._tls)
        return f"Scaling to {counted(servers, 'expert server')}."

    def start_server(self, facts: Facts) -> str:
        """One more than live."""
        return self.scale(facts, len(facts.live(Role.EXPERT_SERVER)) + 1)

    def rebalance(self, facts: Facts) -> str:
        """Plan now, and roll out what pays."""
        with BalancerClient(_balancer(facts), self._tls) as client:
            answer = client.rebalance()
        plan = answer.plan
        verdict = {
            pb.VERDICT_SHARES: "other shares, nothing moves",
            pb.VERDICT_MOVES: moved(plan.transit),
        }.get(plan.verdict, "nothing changes")
        change = f"PAR {plan.par_now:.2f} to {plan.par_then:.2f}"
        return f"{plan.policy}: {verdict}, {change}. {plan.reason}"


def is_paused(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP)."""
    return _status(pid).get("State", "").startswith("T")


def _signal(server: Member, number: signal.Signals) -> None:
    # A paused server counts as DEAD after a while, and can go on all the same.
    gone = server.state.is_gone and number is not signal.SIGCONT
    if server.role is not Role.EXPERT_SERVER or gone:
        raise ClusterError(f"{server.id} is no live expert server")
    if server.host != socket.gethostname():
        raise ClusterError(f"{server.id} runs on {server.host}: end it there")
    try:
        # Named before it is looked at: the number may be another process's a moment later.
        handle = os.pidfd_open(server.pid)
    except OSError as error:
        raise ClusterError(f"{server.id} (pid {server.pid}): {error.strerror}") from error
    except OverflowError as error:
        raise ClusterError(f"{server.id} (pid {server.pid}): No such process") from error
    try:
        if not has_same_launcher(server.pid):
            raise ClusterError(
                f"{server.id} (pid {server.pid}) was started by hand: end it where it was started"
            )
        signal.pidfd_send_signal(handle, number)
    except OSError as error:
        raise ClusterError(f"{server.id} (pid {server.pid}): {error.strerror}") from error
    finally:
        os.close(handle)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _balancer(facts: Facts) -> str:
    living = facts.live(Role.BALANCER)
    if not living:
        raise ClusterError(
            "no balancer lives in this cluster: start one with `eaas balancer --join`"
        )
    return living[0].address

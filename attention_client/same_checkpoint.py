"""Check that a cluster serves the checkpoint of a client."""

from __future__ import annotations

from collections.abc import Iterable

from eaas.errors import ClusterError
from eaas.types import Member, ModelShape, Role

__all__ = ["refuse_other_checkpoint"]


def refuse_other_checkpoint(
    members: Iterable[Member], shape: ModelShape, monitor_address: str
) -> None:
    """Raise ClusterError if every live expert server has another checkpoint than this client.

    Args:
        members: Members of the cluster.
        shape: Model of the client.
        monitor_address: host:port of the monitor, for the message.
    """
    servers = [m for m in members if m.role is Role.EXPERT_SERVER and not m.state.is_gone]
    if servers and all(s.model and s.model.digest != shape.digest for s in servers):
        raise ClusterError(
            f"the cluster at {monitor_address} serves another checkpoint than this "
            "client: use the model directory that its servers were started with"
        )

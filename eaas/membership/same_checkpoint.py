"""Check that a cluster serves the checkpoint of a process that joins it."""

from __future__ import annotations

from collections.abc import Iterable

from eaas.errors import ClusterError
from eaas.types import Member, MemberState, ModelShape

__all__ = ["refuse_other_checkpoint"]

_SERVES = (MemberState.SERVING, MemberState.DRAINING)


def refuse_other_checkpoint(
    members: Iterable[Member], shape: ModelShape, monitor_address: str
) -> None:
    """Raise ClusterError if members serve, and all of them another checkpoint than this process has.

    Before the first members serve, the balancer has not chosen the cluster's checkpoint yet.

    Args:
        members: Members of the cluster.
        shape: Model of this process.
        monitor_address: host:port of the monitor, for the message.
    """
    served = [m.model for m in members if m.state in _SERVES and m.model]
    if served and all(model.digest != shape.digest for model in served):
        raise ClusterError(
            f"the cluster at {monitor_address} serves another checkpoint ({served[0]}) than this process "
            f"has ({shape}): use the model directory that its servers were started with"
        )

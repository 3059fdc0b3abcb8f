"""The planner's actions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eaas.types import Placement

__all__ = [
    "Action",
    "Call",
    "Complain",
    "Inspect",
    "Life",
    "Prepare",
    "Publish",
    "Refuse",
    "Retire",
    "Settled",
]

Life = tuple[str, int, str, int, str, int]
"""One process: `Member.life`, and how many have started under its name (tells equal containers apart)."""


@dataclass(frozen=True)
class Inspect:
    """Ask a server what it holds.

    Attributes:
        server_id: The server.
        life: The addressed process.
        address: host:port of its control port.
        num_layers: MoE layers of the model (L).
        num_experts: Logical experts of a layer (E).
    """

    server_id: str
    life: Life
    address: str
    num_layers: int
    num_experts: int


@dataclass(frozen=True)
class Prepare:
    """Tell a server to hold its share in addition to what it holds already.

    Attributes:
        server_id: The server.
        life: The addressed process.
        address: host:port of its control port.
        placement: The placement that defines the share.
        layer_order: MoE layers to load first, in this order; the others follow.
        digests_LE: Known digests of the experts' bytes (`balancer.planner.digests`); None: none is known.
    """

    server_id: str
    life: Life
    address: str
    placement: Placement
    layer_order: tuple[int, ...] = ()
    digests_LE: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Retire:
    """Tell a server to hold its share and nothing else (attributes: `Prepare`)."""

    server_id: str
    life: Life
    address: str
    placement: Placement


@dataclass(frozen=True)
class Publish:
    """Tell the clients to use the placement."""

    placement: Placement


@dataclass(frozen=True)
class Refuse:
    """Give a server no experts, and say why."""

    server_id: str
    reason: str


@dataclass(frozen=True)
class Settled:
    """Servers hold this placement and nothing else. Emitted once per placement."""

    placement: Placement


@dataclass(frozen=True)
class Complain:
    """Report a problem that the planner cannot solve. Emitted once while it lasts."""

    reason: str


Call = Inspect | Prepare | Retire
"""A call to a server; its outcome is reported to the planner."""

Action = Call | Complain | Publish | Refuse | Settled

"""Actions that the planner returns and `Rollout` carries out: calls to servers, publications, reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eaas.types import Placement

__all__ = [
    "Action",
    "Call",
    "Complain",
    "Complete",
    "Inspect",
    "Prepare",
    "Process",
    "Publish",
    "Retire",
]

Process = tuple[str, int, str, int, str, int]
"""Identity of a process: `Member.process`, and the number of processes started under its name so far.

The number distinguishes restarted containers that are otherwise equal.
"""


@dataclass(frozen=True)
class _ServerCall:
    """A call to an expert server.

    Attributes:
        server_id: The server.
        process: Identity of the addressed process.
        address: host:port of its control port.
    """

    server_id: str
    process: Process
    address: str


@dataclass(frozen=True)
class Inspect(_ServerCall):
    """Ask an expert server which experts it holds (recovery).

    Attributes:
        num_layers: MoE layers of the model (L).
        num_experts: Logical experts of a layer (E).
    """

    num_layers: int
    num_experts: int


@dataclass(frozen=True)
class Prepare(_ServerCall):
    """Tell an expert server to load its share of a placement, in addition to what it holds already.

    Attributes:
        placement: The placement that defines the share.
        layer_order: MoE layers to load first, in this order; the others follow.
        digests_LE: Known digests of the experts' bytes (`balancer.planner.digests`); None: none is known.
    """

    placement: Placement
    layer_order: tuple[int, ...] = ()
    digests_LE: npt.NDArray[np.uint64] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Retire(_ServerCall):
    """Tell an expert server to drop all but its share of a published placement."""

    placement: Placement


@dataclass(frozen=True)
class Publish:
    """Publish a placement to attention clients, which then route tokens by it."""

    placement: Placement


@dataclass(frozen=True)
class Complete:
    """Report a roll-out's end to the history: servers hold this placement and nothing else. Emitted once."""

    placement: Placement


@dataclass(frozen=True)
class Complain:
    """Log a problem that the planner cannot solve, in the balancer. Emitted once while it lasts.

    Attributes:
        reason: For people.
        refused: The server that is given no experts for now; None: the reason is about no server.
    """

    reason: str
    refused: str | None = None


Call = Inspect | Prepare | Retire
"""A call to a server. `Rollout` reports its outcome to the planner."""

Action = Call | Complain | Complete | Publish

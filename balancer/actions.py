"""What the planner wants to be done."""

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
"""One process: `Member.life`, and how many have begun under that name (equal containers are told apart)."""


@dataclass(frozen=True)
class Inspect:
    """Ask a server what it holds.

    Attributes:
        server_id: The server.
        life: The process that is meant.
        address: host:port of its control face.
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
    """Tell a server to hold its share, beside what it holds already.

    Attributes:
        server_id: The server.
        life: The process that is meant.
        address: host:port of its control face.
        placement: Whose share of that server is to be held.
        layer_order: MoE layers in the order in which they are to be loaded; the others follow.
        digests_LE: Of the bytes of all experts, as far as they are known (`balancer.digests`); None: not at
            all.
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
    """Leave a server without work, and say why."""

    server_id: str
    reason: str


@dataclass(frozen=True)
class Settled:
    """Nothing to do: the placement is all that servers hold. Said once for each."""

    placement: Placement


@dataclass(frozen=True)
class Complain:
    """Nothing can be done about something; say so. Said once while it lasts."""

    reason: str


Call = Inspect | Prepare | Retire
"""A call to a server; its outcome is to be told to the planner."""

Action = Call | Complain | Publish | Refuse | Settled

"""What the planner wants to be done."""

from __future__ import annotations

from dataclasses import dataclass

from eaas.types import Placement

__all__ = ["Action", "Call", "Inspect", "Prepare", "Publish", "Refuse", "Retire"]


@dataclass(frozen=True)
class Inspect:
    """Ask a server what it holds.

    Attributes:
        server_id: The server.
        incarnation: The life of it that is meant.
        address: host:port of its control face.
        num_experts: Logical experts of a layer.
    """

    server_id: str
    incarnation: int
    address: str
    num_experts: int


@dataclass(frozen=True)
class Prepare:
    """Tell a server to hold its share, beside what it holds already.

    Attributes:
        server_id: The server.
        incarnation: The life of it that is meant.
        address: host:port of its control face.
        placement: Whose share of that server is to be held.
    """

    server_id: str
    incarnation: int
    address: str
    placement: Placement


@dataclass(frozen=True)
class Retire:
    """Tell a server to hold its share and nothing else (attributes: `Prepare`)."""

    server_id: str
    incarnation: int
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


Call = Inspect | Prepare | Retire
"""A call to a server; its outcome is to be told to the planner."""

Action = Call | Publish | Refuse

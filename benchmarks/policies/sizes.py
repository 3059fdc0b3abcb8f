"""Sizes of planning tasks: layers, experts, servers, slots, and the allowed time."""

from __future__ import annotations

from dataclasses import dataclass

from eaas.errors import ConfigError

__all__ = ["SIZES", "Size", "parse_size"]


@dataclass(frozen=True)
class Size:
    """The size of one planning task.

    Attributes:
        layers: L.
        experts: E.
        servers: S.
        slots: Replicas per layer.
        limit_ms: Allowed planning time on one core; None: no limit.
    """

    layers: int
    experts: int
    servers: int
    slots: int
    limit_ms: float | None = None


# Default tasks: DeepSeek-R1 at its published decode and prefill sizes, and a large cluster.
SIZES = (
    Size(58, 256, 64, 320, 10.0),
    Size(58, 256, 288, 576, 25.0),
    Size(60, 512, 1000, 2000, 1000.0),
)


def parse_size(text: str) -> Size:
    """Parse the option's L,E,S,P (layers, experts, servers, slots). Raises ConfigError."""
    try:
        layers, experts, servers, slots = map(int, text.split(","))
    except ValueError:
        layers = experts = servers = slots = 0
    if min(layers, experts, servers) < 1 or not experts <= slots <= experts * servers:
        raise ConfigError(
            f"--size {text}: give layers, experts, servers and slots as L,E,S,P, with "
            "slots from E to E x S"
        )
    return Size(layers, experts, servers, slots)

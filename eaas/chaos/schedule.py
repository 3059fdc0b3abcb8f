"""Which faults come, in what order: from a seed, and nothing else.

There are two lanes. Faults of one lane come one after another, each when the one before is over and mended;
the lanes go on beside each other, so that a server dies while the monitor is down, or in a rebalance.

    servers:  kill  hang  slow  partition  memory  pair
    control:  monitor  pause  balancer  rebalance  scale  damaged  unreachable  names

Each kind comes once, in an order that is drawn, before any comes again: short runs meet all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["CONTROL", "KINDS", "SERVERS", "Fault", "lane"]

SERVERS = ("kill", "hang", "slow", "partition", "memory", "pair")
"""Faults of expert servers: killed; stopped and let go on; given a tenth of the processor; cut off from the
control plane; killed, and started again where shared memory is full; two killed at once."""
CONTROL = ("monitor", "pause", "balancer", "rebalance", "scale", "damaged", "unreachable", "names")
"""Faults and changes of the control plane: monitor killed; monitor stopped and let go on; balancer killed;
another placement; a server more, and then one less; a server more whose copy of the checkpoint is damaged;
a server more that no client reaches; servers that try to register under hostile names."""
KINDS = SERVERS + CONTROL

# Calm before a fault, and how long one lasts, in seconds: less and more than a lease (2 s).
_CALM_S = (0.3, 1.5)
_LASTS_S = {
    "kill": (0.1, 3.0),
    "hang": (0.3, 4.0),
    "slow": (1.0, 4.0),
    "partition": (0.5, 5.0),
    "memory": (0.1, 1.0),
    "pair": (0.1, 2.0),
    "monitor": (0.5, 5.0),
    "pause": (0.5, 5.0),
    "balancer": (0.2, 3.0),
    "rebalance": (0.0, 0.0),
    "scale": (0.5, 2.0),
    "damaged": (0.0, 0.0),
    "unreachable": (1.0, 4.0),
    "names": (0.5, 2.0),
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: Of `KINDS`.
        calm_s: Seconds without a fault of this lane before it.
        lasts_s: Seconds from its begin until it is mended.
        servers: Numbers of the expert servers that it meets; empty where it meets none.
        dice: For whatever else it has to draw.
    """

    kind: str
    calm_s: float
    lasts_s: float
    servers: tuple[int, ...]
    dice: int


def lane(seed: int, name: str, kinds: Sequence[str], servers: int) -> Iterator[Fault]:
    """The faults of one lane, without end; none where there are no kinds.

    Args:
        seed: Of the run.
        name: Of the lane: lanes of one seed are drawn apart.
        kinds: Of `KINDS`.
        servers: Expert servers that there are.
    """
    # A string is hashed the same way in every process and release of Python.
    dice = random.Random(f"{seed} {name}")
    while kinds:
        for kind in dice.sample(sorted(kinds), len(kinds)):
            met = {"pair": 2}.get(kind, 1 if kind in SERVERS else 0)
            yield Fault(
                kind,
                dice.uniform(*_CALM_S),
                dice.uniform(*_LASTS_S[kind]),
                # Whoever has a network of its own is the first one.
                (0,) if kind == "partition" else tuple(dice.sample(range(servers), met)),
                dice.getrandbits(32),
            )

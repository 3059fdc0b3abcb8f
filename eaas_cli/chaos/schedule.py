"""The schedule of a chaos run's faults, drawn from a seed.

There are three lanes. In a lane, a fault begins when the one before is mended. The lanes run at the same
time, so that a server dies while the monitor is down, during a rebalance, or together with a client.

    servers:  kill  hang  slow  partition  memory  pair
    clients:  client-kill  client-hang  client-drain
    control:  monitor  pause  balancer  rebalance  scale  damaged  unreachable  names

Each kind comes once, in random order, before any comes again: short runs have all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["CLIENTS", "CONTROL", "KINDS", "SERVERS", "Fault", "lane"]

SERVERS = ("kill", "hang", "slow", "partition", "memory", "pair")
"""Faults of expert servers: killed; stopped and resumed; slowed to a tenth of the processor; partitioned from
the control plane; killed and restarted with full shared memory; two killed at once."""
CLIENTS = ("client-kill", "client-hang", "client-drain")
"""Faults of attention clients, whose requests another one goes on with: killed; stopped and resumed; drained
and started again."""
CONTROL = ("monitor", "pause", "balancer", "rebalance", "scale", "damaged", "unreachable", "names")
"""Faults and changes of the control plane: monitor killed; monitor stopped and resumed; balancer killed;
another placement; a server joins and leaves; a server joins with a damaged checkpoint; a server joins that no
client reaches; servers try to register under hostile names."""
KINDS = SERVERS + CLIENTS + CONTROL

# Ranges, in seconds, of the calm before a fault and of the fault: shorter and longer than a lease (2 s).
_CALM_S = (0.3, 1.5)
_LASTS_S = {
    "kill": (0.1, 3.0),
    "hang": (0.3, 4.0),
    "slow": (1.0, 4.0),
    "partition": (0.5, 5.0),
    "memory": (0.1, 1.0),
    "pair": (0.1, 2.0),
    "client-kill": (0.1, 3.0),
    "client-hang": (0.3, 4.0),
    "client-drain": (0.1, 1.0),
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
    """One scheduled fault: drawn by `lane`, injected by `Faults.strike`.

    Attributes:
        kind: One of `KINDS`.
        calm_s: Seconds without a fault of this lane before it.
        lasts_s: Seconds until it is mended.
        numbers: Numbers of the expert servers or attention clients that it hits, if any.
        dice: Seed of its other random choices.
    """

    kind: str
    calm_s: float
    lasts_s: float
    numbers: tuple[int, ...]
    dice: int


def lane(seed: int, name: str, kinds: Sequence[str], processes: int) -> Iterator[Fault]:
    """Yield the faults of one lane, without end; none if `kinds` is empty.

    `name`: name of the lane; lanes of one seed are drawn independently. `processes`: number of processes that
    its faults can hit.
    """
    # `random` seeds from a string the same way in every process and release of Python.
    dice = random.Random(f"{seed} {name}")
    while kinds:
        for kind in dice.sample(sorted(kinds), len(kinds)):
            hits = {"pair": 2}.get(kind, 0 if kind in CONTROL else 1)
            yield Fault(
                kind,
                dice.uniform(*_CALM_S),
                dice.uniform(*_LASTS_S[kind]),
                # Only the first server has its own network.
                (0,) if kind == "partition" else tuple(dice.sample(range(processes), hits)),
                dice.getrandbits(32),
            )

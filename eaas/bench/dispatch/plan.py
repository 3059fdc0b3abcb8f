"""What to measure, from the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaas.bench.experts.plan import BUILT_IN, Shape
from eaas.bench.options import known, numbers, once

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        transports: In the order in which they are measured; the first one also meets the crowd.
        hidden: Hidden sizes.
        tokens: T of the exchanges; all of them fit a slot.
        rounds: Turns of each measurement.
        with_server: Whether the server itself, the crowd and a real layer are measured, too.
        top_k: K.
        num_experts: E.
        turn_s: Seconds of a turn.
        watch_s: Seconds that a server is watched for.
        clients, servers: Processes of the crowd.
        crowd_tokens: T of their exchanges.
        policy_tokens: T of the layer calls that compare dispatch policies.
        layer: Of the real layer.
        layer_tokens: T of its calls.
    """

    transports: tuple[str, ...]
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    with_server: bool
    top_k: int = 8
    num_experts: int = 128
    turn_s: float = 0.2
    watch_s: float = 3.0
    clients: int = 8
    servers: int = 4
    crowd_tokens: int = 8
    policy_tokens: int = 64
    layer: Shape = BUILT_IN[0]
    layer_tokens: int = 64


def make_plan(
    *,
    transports: Sequence[str],
    known_transports: Sequence[str],
    hidden: str,
    tokens: str,
    rounds: int,
    with_server: bool,
) -> Plan:
    """Check what was asked for.

    Args:
        transports: Some of `known_transports`; empty for all.
        known_transports: What servers offer here.
        hidden: Hidden sizes with commas in between.
        tokens: Batch sizes with commas in between.
        rounds: At least 1.
        with_server: As in the plan.

    Raises:
        ConfigError: Names the option, what is wrong with it and what it takes.
    """
    return Plan(
        transports=known("--transport", transports or known_transports, known_transports),
        hidden=once(numbers("--hidden", hidden)),
        tokens=tuple(sorted(set(numbers("--tokens", tokens)))),
        rounds=rounds,
        with_server=with_server,
    )

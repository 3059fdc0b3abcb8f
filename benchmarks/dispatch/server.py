"""Starts of expert servers without a cluster, by the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from benchmarks.dispatch.plan import Plan
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.worker import Worker

__all__ = ["kernel_server", "null_server"]


def null_server(
    plan: Plan, hidden: int, tokens: int, slots: int, sleep_us: int = 0, name: str = "server"
) -> Callable[..., Worker]:
    """Make the function that starts a server which computes nothing.

    Args:
        hidden: H.
        tokens: T that a slot holds.
        sleep_us: How long it sleeps instead.
        name: Name of the process.
    """
    return partial(
        Worker,
        name,
        "benchmarks.dispatch.server_process",
        hidden=hidden,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        slot_tokens=tokens,
        slots=slots,
        layer=None,
        layers=1,
        sleep_us=sleep_us,
    )


def kernel_server(
    shape: Shape, *, threads: int, tokens: int, slots: int, layers: int = 1
) -> Callable[..., Worker]:
    """Make the function that starts a server with `auto`'s kernel and random experts, in about a minute.

    While it is idle, that server executes commands: {"tokens": T, "seeds": [...]} calls the kernel in its own
    process and answers the times in nanoseconds; "read" reads memory with as many threads, answers bytes/s.

    Args:
        tokens: T that a slot holds.
    """
    return partial(
        Worker,
        "layer-server",
        "benchmarks.dispatch.server_process",
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        slot_tokens=tokens,
        slots=slots,
        layer={"threads": threads, "shape": dataclasses.asdict(shape)},
        layers=layers,
    )

"""Servers without a cluster, as the process that starts them sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from attention_client.dispatch.parts import CHUNK_PAIRS
from eaas.bench.dispatch.plan import Plan
from eaas.bench.worker import Worker

__all__ = ["kernel_server", "null_server", "waiting_server"]


def null_server(
    plan: Plan, hidden: int, tokens: int, slots: int, name: str = "server"
) -> Callable[[], Worker]:
    """Starts a server that computes nothing.

    Args:
        plan: Of the run.
        hidden: H.
        tokens: T that a slot takes.
        slots: Of the arena.
        name: For people.
    """
    return waiting_server(plan, hidden, tokens, slots, 0.0, name)


def waiting_server(
    plan: Plan, hidden: int, tokens: int, slots: int, work_s: float, name: str
) -> Callable[[], Worker]:
    """Starts a server that waits as long as another one may take to compute.

    Args:
        plan: Of the run.
        hidden: H.
        tokens: T that a slot takes.
        slots: Of the arena.
        work_s: Seconds for a unit of work (`attention_client.dispatch.parts.Chunks`).
        name: For people.
    """
    return partial(
        Worker,
        name,
        "eaas.bench.dispatch.server_process",
        hidden=hidden,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        slot_tokens=tokens,
        slots=slots,
        work={"seconds": work_s, "chunk_pairs": CHUNK_PAIRS},
        layer=None,
    )


def kernel_server(plan: Plan, slots: int, threads: int) -> Callable[[], Worker]:
    """Starts a server with the kernel of `auto` and random experts of the plan's layer; takes a minute.

    To the command {"seeds": [...]} it calls its kernel in its own process, and answers how long each took.
    """
    layer = plan.layer
    return partial(
        Worker,
        "layer-server",
        "eaas.bench.dispatch.server_process",
        hidden=layer.hidden,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        slot_tokens=plan.layer_tokens,
        slots=slots,
        layer={"threads": threads, "shape": dataclasses.asdict(layer)},
    )

"""Starts of expert servers without a cluster, by the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from benchmarks.dispatch.plan import Plan
from eaas_cli.bench.worker import Worker

__all__ = ["kernel_server", "null_server"]


def null_server(plan: Plan, hidden: int, tokens: int, slots: int) -> Callable[..., Worker]:
    """Make the function that starts a server which computes nothing.

    Args:
        hidden: H.
        tokens: T that a slot holds.
    """
    return partial(
        Worker,
        "server",
        "benchmarks.dispatch.server_process",
        hidden=hidden,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        slot_tokens=tokens,
        slots=slots,
        layer=None,
    )


def kernel_server(plan: Plan, slots: int, threads: int) -> Callable[..., Worker]:
    """Make the function that starts a server with `auto`'s kernel and random experts, in about a minute.

    On the command {"seeds": [...]} that server calls the kernel in its own process and answers the times.
    """
    layer = plan.layer
    return partial(
        Worker,
        "layer-server",
        "benchmarks.dispatch.server_process",
        hidden=layer.hidden,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        slot_tokens=plan.layer_tokens,
        slots=slots,
        layer={"threads": threads, "shape": dataclasses.asdict(layer)},
    )

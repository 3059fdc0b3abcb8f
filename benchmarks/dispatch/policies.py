"""The dispatch policies under skewed routing, with one server at half speed.

The servers sleep instead of computing, so that there can be more of them than cores. A unit of work (an
expert's weights, or 64 of its pairs, see `attention_client.dispatch`) takes `_WORK_S`, and twice as long on
the first server.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from attention_client.connections.deadlines import HedgeBudget
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call.call import ClusterView, Dispatcher, LayerCall
from attention_client.telemetry.metrics import ClientMetrics
from benchmarks.dispatch.caller import Caller, FixedView, Request
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import waiting_server
from benchmarks.dispatch.turns import Turn, summary, take_turn
from eaas.types import Placement
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_policies", "skewed_request"]

_POLICIES = ("weights", "least_loaded")
_WORK_S = 50e-6
_SLOW = 2.0
_REDUNDANCY = 2
# Power law of routing: expert rank r is wanted in proportion to 1 / r.
_SKEW = 1.0
_REQUESTS = 16
_ANSWER_S = 30.0


def bench_policies(plan: Plan, slots: int, fork_server: ForkServer) -> dict[str, Any]:
    """Measure `policies` of the document: layer calls by each policy in turn, to the same servers."""
    transport, hidden, tokens = plan.transports[0], plan.hidden[0], plan.policy_tokens
    starts = [
        waiting_server(
            plan, hidden, tokens, slots, _WORK_S * (1.0 if number else _SLOW), f"server-{number}"
        )
        for number in range(plan.servers)
    ]
    requests = [skewed_request(plan, hidden, tokens, seed) for seed in range(_REQUESTS)]
    turns: dict[str, list[Turn]] = {name: [] for name in _POLICIES}
    with working(starts, fork_server) as workers, ExitStack() as stack:
        callers = [
            stack.enter_context(
                Caller(
                    str(worker.address),
                    transport,
                    hidden=hidden,
                    num_experts=plan.num_experts,
                    top_k=plan.top_k,
                    name="client",
                    slots=slots,
                    server=worker.name,
                )
            )
            for worker in workers
        ]
        view = ClusterView(
            _placement(plan, [worker.name for worker in workers]),
            tuple(caller.connection for caller in callers),
        )
        dispatchers = {name: _dispatcher(view, name) for name in _POLICIES}
        for _ in range(plan.rounds):
            for name, dispatcher in dispatchers.items():
                turns[name].append(Turn.of(_turn(dispatcher, requests, plan.turn_s)))
    usual = summary(turns["weights"])["p50"]
    rows = []
    for name, taken in turns.items():
        found = summary(taken)
        rows.append(
            {
                "policy": name,
                "layer_call_us": found,
                "times_weights": figure(found["p50"] / usual),
            }
        )
    return {
        "transport": transport,
        "hidden": hidden,
        "tokens": tokens,
        "servers": plan.servers,
        "redundancy": min(_REDUNDANCY, plan.servers),
        "slow_server_speed": 1 / _SLOW,
        "skew": _SKEW,
        "work_us": _WORK_S * 1e6,
        "rows": rows,
    }


def skewed_request(plan: Plan, hidden: int, tokens: int, seed: int) -> Request:
    """A request with experts drawn without replacement, in proportion to 1 / (expert + 1)."""
    rng = np.random.default_rng(seed)
    weight_E = (1.0 + np.arange(plan.num_experts)) ** -_SKEW
    # Gumbel top-k trick: the largest log-weights plus noise are a draw without replacement.
    keys_TE = np.log(weight_E) + rng.gumbel(size=(tokens, plan.num_experts))
    ids_TK = keys_TE.argsort(axis=1)[:, -plan.top_k :]
    scores_TK = rng.random((tokens, plan.top_k), dtype=np.float32)
    x_TH = torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32)).bfloat16()
    return Request.of(x_TH, ids_TK, scores_TK)


def _placement(plan: Plan, names: Sequence[str]) -> Placement:
    """Place expert e on servers e, e + 1, ... in equal shares."""
    holds_SE = np.zeros((plan.servers, plan.num_experts), dtype=np.bool_)
    for replica in range(min(_REDUNDANCY, plan.servers)):
        expert_E = np.arange(plan.num_experts)
        holds_SE[(expert_E + replica) % plan.servers, expert_E] = True
    shares_SE = (holds_SE / holds_SE.sum(axis=0)).astype(np.float32)
    return Placement(1, tuple(names), holds_SE[None], shares_SE[None])


def _dispatcher(view: ClusterView, policy: str) -> Dispatcher:
    metrics = ClientMetrics(CollectorRegistry())
    return Dispatcher(
        FixedView(view), dispatch_policy(policy), _ANSWER_S, _ANSWER_S, HedgeBudget(0.0), metrics
    )


def _turn(dispatcher: Dispatcher, requests: list[Request], seconds: float) -> list[int]:
    calls = 0

    def call() -> None:
        nonlocal calls
        request = requests[calls % len(requests)]
        calls += 1
        LayerCall(dispatcher, request.inputs, request.ids_TK, request.wanted_TK).run()

    return take_turn(call, seconds)

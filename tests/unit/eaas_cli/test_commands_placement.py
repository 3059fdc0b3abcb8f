"""Sentences of `eaas plan` and `eaas history`, for all numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from eaas.rpc.v1 import balancer_pb2 as pb


def moves(loads: int, unloads: int) -> list[pb.Move]:
    return [pb.Move(unload=i >= loads) for i in range(loads + unloads)]


@pytest.mark.parametrize(
    ("gain", "payback_s", "words"),
    [
        (0.0, math.inf, "would not lower the PAR"),
        (0.5, 3.0, "would lower the PAR by 0.500 and pay back in 3.0 s"),
    ],
)
def test_moves_of_a_plan(
    balancers_answer: Callable[..., Any], gain: float, payback_s: float, words: str
) -> None:
    plan = pb.PlanResponse(transit=2, bytes=4_000_000, moves=moves(2, 1))
    plan.gain, plan.payback_s = gain, payback_s
    told = balancers_answer("plan", plan, "plan").stdout.splitlines()
    assert f"2 loads (4.0 MB) and 1 unload, which {words}" in told
    told = balancers_answer("plan", pb.PlanResponse(payback_s=math.inf), "plan").stdout
    assert "nothing would move" in told.splitlines()


SHARES = "New shares are being applied; no expert moves."


@pytest.mark.parametrize(
    ("applied", "verdict", "count", "words", "line"),
    [
        (False, pb.VERDICT_NOTHING, 2, [], "Nothing changes."),
        (True, pb.VERDICT_MOVES, 2, [], "The moves are being applied."),
        (True, pb.VERDICT_SHARES, 2, [], SHARES),
        (True, pb.VERDICT_SHARES, 2, ["--force"], "The moves are being applied."),
        (True, pb.VERDICT_NOTHING, 0, ["--force"], SHARES),
    ],
)
def test_rebalance_says_what_it_applies(
    balancers_answer: Callable[..., Any],
    applied: bool,
    verdict: pb.Verdict,
    count: int,
    words: list[str],
    line: str,
) -> None:
    plan = pb.PlanResponse(
        verdict=verdict, moves=moves(count, 0), transit=count, payback_s=math.inf
    )
    answer = pb.RebalanceResponse(applied=applied, plan=plan)
    result = balancers_answer("rebalance", answer, "rebalance", *words)
    assert result.stdout.splitlines()[-1] == line
    assert "no gain" not in result.stdout
    assert result.stderr == "cluster: http://h:1\n"


def test_an_unfinished_phase_has_no_time(balancers_answer: Callable[..., Any]) -> None:
    entry = pb.HistoryEntry(number=3, trigger="manual", reason="why", epoch_before=1, epoch=2)
    told = balancers_answer("history", [entry], "history").stdout
    assert told.endswith("epoch 1 -> 2, plan 0.00 s, prepare -, retire -\n")

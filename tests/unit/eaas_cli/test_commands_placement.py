"""Sentences of `eaas plan` and `eaas history`, for all numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from eaas.counted import counted
from eaas.rpc.v1 import balancer_pb2 as pb


def moves(loads: int, unloads: int) -> list[pb.Move]:
    return [pb.Move(unload=i >= loads) for i in range(loads + unloads)]


@pytest.mark.parametrize(
    ("loads", "unloads", "gain", "payback_s", "line"),
    [
        (0, 0, 0.0, math.inf, "nothing would move"),
        (1, 0, 0.0, math.inf, "1 load (2.0 MB), which would not lower the PAR"),
        (2, 1, 0.0, math.inf, "2 loads (4.0 MB) and 1 unload, which would not lower the PAR"),
        (
            1,
            2,
            0.5,
            3.0,
            "1 load (2.0 MB) and 2 unloads, which would lower the PAR by 0.500 and pay back in 3.0 s",
        ),
        (
            0,
            1,
            0.1,
            0.0,
            "0 loads (0.0 MB) and 1 unload, which would lower the PAR by 0.100 and pay back in 0.0 s",
        ),
    ],
)
def test_moves_of_a_plan(
    balancers_answer: Callable[..., Any],
    loads: int,
    unloads: int,
    gain: float,
    payback_s: float,
    line: str,
) -> None:
    answer = pb.PlanResponse(
        transit=loads,
        bytes=loads * 2_000_000,
        moves=moves(loads, unloads),
        gain=gain,
        payback_s=payback_s,
    )
    assert line in balancers_answer("plan", answer, "plan").stdout.splitlines()


@pytest.mark.parametrize(
    ("applied", "verdict", "count", "words", "line"),
    [
        (False, pb.VERDICT_NOTHING, 2, [], "Nothing changes."),
        (True, pb.VERDICT_MOVES, 2, [], "The moves are being applied."),
        (True, pb.VERDICT_SHARES, 2, [], "New shares are being applied; no expert moves."),
        (True, pb.VERDICT_SHARES, 2, ["--force"], "The moves are being applied."),
        (
            True,
            pb.VERDICT_NOTHING,
            0,
            ["--force"],
            "New shares are being applied; no expert moves.",
        ),
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
    answer = pb.RebalanceResponse(applied=applied)
    answer.plan.MergeFrom(
        pb.PlanResponse(verdict=verdict, moves=moves(count, 0), transit=count, payback_s=math.inf)
    )
    result = balancers_answer("rebalance", answer, "rebalance", *words)
    assert result.stdout.splitlines()[-1] == line
    assert "no gain" not in result.stdout
    assert result.stderr == "cluster: http://h:1\n"


def test_an_unfinished_phase_has_no_time(balancers_answer: Callable[..., Any]) -> None:
    entry = pb.HistoryEntry(number=3, trigger="manual", reason="why", epoch_before=1, epoch=2)
    told = balancers_answer("history", [entry], "history").stdout
    assert told.endswith("epoch 1 -> 2, plan 0.00 s, prepare -, retire -\n")


def test_one_is_singular() -> None:
    assert [counted(n, "server") for n in (0, 1, 2, 1000)] == [
        *("0 servers", "1 server", "2 servers", "1,000 servers"),
    ]

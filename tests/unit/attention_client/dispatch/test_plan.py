"""The compiled plan equals its steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.dispatch import Load, _dispatch, dispatch_policy
from attention_client.dispatch.parts import NOWHERE, group, pairs_of, split, without
from attention_client.dispatch.plan import plan


@st.composite
def situations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, Load, list[int]]:
    servers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holds_SE = rng.random((servers, experts)) < draw(st.floats(0, 1))
    shares_SE = np.where(holds_SE, rng.random((servers, experts)), 0).astype(np.float32)
    ids_TK = rng.integers(0, experts, (tokens, top_k))
    # Enough pairs of one expert for several chunks.
    ids_TK[rng.random(tokens) < draw(st.sampled_from((0.0, 0.9)))] = 0
    wanted_TK = rng.random(ids_TK.shape) < draw(st.sampled_from((0.3, 1.0)))
    load = Load(rng.uniform(0.1, 10, servers), rng.uniform(0, 5, servers))
    return ids_TK, wanted_TK, shares_SE, load, [draw(st.integers(1, 50)) for _ in range(servers)]


@pytest.mark.parametrize("name", ["least_loaded", "split", "weights", "round_robin", "random"])
@settings(deadline=None)
@given(drawn=situations())
def test_plan_equals_its_three_steps(name: str, drawn) -> None:
    ids_TK, wanted_TK, shares_SE, load, room = drawn
    one, other = dispatch_policy(name), dispatch_policy(name)
    backlog_S = load.backlog_S.copy()
    for _ in range(3):
        parts, complete = plan(one, ids_TK, wanted_TK, shares_SE, load, room)
        chunks = group(ids_TK, wanted_TK, shares_SE.shape[1])
        server_C = other.choose(chunks, shares_SE, load)
        assert complete == (server_C != NOWHERE).all()
        by_steps = split(ids_TK, chunks, server_C, room)
        assert [p.server for p in parts] == [p.server for p in by_steps]
        for part, right in zip(parts, by_steps, strict=True):
            assert part.rows_R.tolist() == right.rows_R.tolist()
            assert part.ids_RK.tolist() == right.ids_RK.tolist()
            assert part.work == pytest.approx(right.work)
    assert (load.backlog_S == backlog_S).all()


@settings(deadline=None)
@given(situations())
def test_without_returns_the_pairs_outside_all_parts(drawn) -> None:
    ids_TK, wanted_TK, shares_SE, load, room = drawn
    parts, complete = plan(
        dispatch_policy("least_loaded"), ids_TK, wanted_TK, shares_SE, load, room
    )
    left_TK = without(wanted_TK, parts)
    held_E = (shares_SE > 0).any(axis=0)
    if left_TK is None:
        left_TK = np.zeros_like(wanted_TK)
    assert (left_TK == (wanted_TK & ~held_E[ids_TK])).all()
    assert complete == (not left_TK.any())
    for part in parts:
        assert (pairs_of(part, ids_TK.shape)[part.rows_R] == part.pairs_RK).all()
        assert not (pairs_of(part, ids_TK.shape) & left_TK).any()


@pytest.mark.parametrize("expert", [-1, 4, 2**40])
@pytest.mark.parametrize("name", ["least_loaded", "round_robin"])
def test_an_unknown_expert_is_refused(name: str, expert: int) -> None:
    ids_TK, load = np.array([[0, expert]]), Load(np.ones(1), np.zeros(1))
    shares_SE = np.ones((1, 4), dtype=np.float32)
    wanted_TK = np.ones((1, 2), dtype=bool)
    with pytest.raises(IndexError, match=f"expert {expert} of 4"):
        plan(dispatch_policy(name), ids_TK, wanted_TK, shares_SE, load, [8])
    wanted_TK[0, 1] = False
    parts, complete = plan(dispatch_policy(name), ids_TK, wanted_TK, shares_SE, load, [8])
    assert complete
    assert parts[0].ids_RK.tolist() == [[0, -1]]


I64, I32, F32, F64 = np.int64, np.int32, np.float32, np.float64


def test_the_compiled_plan_checks_its_arguments() -> None:
    right = {
        "ids": np.zeros((2, 2), I64), "wanted": np.ones((2, 2), bool), "tokens": 2, "top_k": 2,
        "shares": np.ones((1, 1), F32), "servers": 1, "experts": 1, "chunk_pairs": 64,
        "draw": 0.5, "step": 0.5, "rate": np.ones(1), "backlog": np.zeros(1),
        "rows_out": np.zeros(2, I64), "ids_out": np.zeros((2, 2), I32),
    }  # fmt: skip
    assert _dispatch.plan(*right.values()) == (0, [(0, 2, 1 + 4 / 64)])
    assert right["rows_out"].tolist() == [0, 1]
    for wrong in (
        {"tokens": 3}, {"tokens": -1}, {"top_k": 2**40}, {"servers": 2}, {"servers": -1},
        {"servers": 0, "experts": 2**61}, {"chunk_pairs": 2**62},
        {"experts": 2}, {"experts": 0}, {"chunk_pairs": 0}, {"draw": 1.0}, {"step": np.nan},
        {"rate": None}, {"rate": np.ones(1, F32)}, {"backlog": np.ones(0)},
        {"ids": np.zeros((2, 2), I32)}, {"wanted": np.ones(3, bool)}, {"shares": np.ones((1, 1))},
        {"rows_out": np.zeros(1, I64)}, {"ids_out": np.zeros((2, 1), I32)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"out of range|bytes in items"):
            _dispatch.plan(*(right | wrong).values())

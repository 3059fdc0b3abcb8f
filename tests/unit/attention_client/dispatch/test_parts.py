"""Group pairs into chunks, split chunks into parts, combine their results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import NOWHERE, Part, combine, group, split


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    experts = draw(st.integers(1, 9))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    wanted_TK = rng.random((tokens, top_k)) < draw(st.floats(0, 1))
    return rng.integers(0, experts, (tokens, top_k)), wanted_TK, experts


@settings(deadline=None)
@given(routings(), st.integers(1, 8))
def test_a_chunk_holds_a_bounded_number_of_one_experts_pairs(routing, chunk_pairs: int) -> None:
    ids_TK, wanted_TK, experts = routing
    chunks = group(ids_TK, wanted_TK, experts, chunk_pairs)
    assert ((chunks.of_TK >= 0) == wanted_TK).all()
    assert (chunks.expert_C[chunks.of_TK[wanted_TK]] == ids_TK[wanted_TK]).all()
    pairs_C = np.bincount(chunks.of_TK[wanted_TK], minlength=chunks.expert_C.size)
    assert np.allclose(chunks.work_C, 1 + pairs_C / chunk_pairs)
    for expert in range(experts):
        own_C = pairs_C[chunks.expert_C == expert]
        pairs = int((ids_TK[wanted_TK] == expert).sum())
        assert own_C.sum() == pairs
        assert own_C.size == -(-pairs // chunk_pairs)
        assert own_C.size == 0 or own_C.max() - own_C.min() <= 1
        assert (own_C > 0).all()


@settings(deadline=None)
@given(routings(), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_parts_hold_each_pair_once_and_each_token_once_per_server(
    routing, servers, room, random
) -> None:
    ids_TK, wanted_TK, experts = routing
    chunks = group(ids_TK, wanted_TK, experts, 3)
    server_C = np.array(
        [random.randint(NOWHERE, servers - 1) for _ in chunks.expert_C], dtype=np.int64
    )
    server_TK = np.where(wanted_TK, np.append(server_C, NOWHERE)[chunks.of_TK], NOWHERE)
    parts = split(ids_TK, chunks, server_C, [room] * servers)
    seen_TK = np.zeros(ids_TK.shape, dtype=int)
    for part in parts:
        assert 0 < part.rows_R.size <= room
        assert part.pairs_RK.any(axis=1).all()
        assert (server_TK[part.rows_R][part.pairs_RK] == part.server).all()
        assert (part.ids_RK[part.pairs_RK] == ids_TK[part.rows_R][part.pairs_RK]).all()
        assert (part.ids_RK[~part.pairs_RK] == -1).all()
        seen_TK[part.rows_R] += part.pairs_RK
    assert (seen_TK == (server_TK != NOWHERE)).all()
    tokens = [(part.server, int(t)) for part in parts for t in part.rows_R]
    assert tokens == sorted(set(tokens))
    placed = chunks.work_C[server_C != NOWHERE].sum()
    assert sum(part.work for part in parts) == pytest.approx(placed)


@st.composite
def answered(draw: st.DrawFn) -> tuple[int, int, list[tuple[Part, np.ndarray]]]:
    tokens, hidden = draw(st.integers(0, 12)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    results = []
    for server in range(draw(st.integers(0, 4))):
        rows_R = np.flatnonzero(rng.random(tokens) < 0.5)
        if rows_R.size:
            ids_RK = np.full((rows_R.size, 1), server, dtype=np.int32)
            part_RH = rng.standard_normal((rows_R.size, hidden)).astype(np.float32)
            results.append((Part(server, rows_R, ids_RK, 1.0), part_RH))
    return tokens, hidden, results


@settings(deadline=None)
@given(answered(), st.randoms(use_true_random=False))
def test_combine_is_bit_exact_in_server_order(drawn, random) -> None:
    tokens, hidden, results = drawn
    right_TH = torch.zeros(tokens, hidden)
    for part, part_RH in results:
        right_TH.index_add_(0, torch.from_numpy(part.rows_R), torch.from_numpy(part_RH))
    random.shuffle(results)
    out_TH = combine((tokens, hidden), results)
    assert out_TH.numpy().tobytes() == right_TH.numpy().tobytes()


def test_combine_keeps_nan_and_gives_positive_zero() -> None:
    part = Part(0, np.array([1]), np.zeros((1, 1), dtype=np.int32), 1.0)
    out_TH = combine((3, 2), [(part, np.array([[np.nan, -0.0]], dtype=np.float32))])
    assert out_TH[1, 0].isnan()
    assert not torch.signbit(out_TH[1, 1])
    assert (out_TH[[0, 2]] == 0).all()


def test_two_parts_of_one_server_and_token_have_a_fixed_order() -> None:
    """After a failover a token may be in two parts of the same server, with other experts."""
    rng = np.random.default_rng(1)
    rows_R = np.array([0, 2])
    results = [
        (
            Part(server, rows_R, np.full((2, 1), expert, dtype=np.int32), 1.0),
            (rng.standard_normal((2, 8)) * 10.0**expert).astype(np.float32),
        )
        for server in range(2)
        for expert in range(2)
    ]
    sums = {combine((3, 8), order).numpy().tobytes() for order in itertools.permutations(results)}
    assert len(sums) == 1


# -- argument checks of the compiled loops ------------------------------------------------------------

I64, I32, F32, F64 = np.int64, np.int32, np.float32, np.float64


def test_combine_checks_its_arguments() -> None:
    out, part, rows = np.zeros((2, 4), F32), np.zeros((1, 4), F32), np.array([1], I64)
    _dispatch.combine(out, 2, 4, [part], [rows])
    for wrong in (np.array([2], I64), np.array([-1], I64)):
        with pytest.raises(IndexError, match="of 2"):
            _dispatch.combine(out, 2, 4, [part], [wrong])
    for arguments in (
        (out, 3, 4, [part], [rows]),
        (out, 2, 5, [part], [rows]),
        (out, 2, 4, [part], []),
        (out, 2, 4, [part], [np.array([0, 1], I64)]),
        (out, 2, 4, [part.astype(F64)], [rows]),
        (out, 2, 4, [part], [rows.astype(I32)]),
        (out.astype(F64), 2, 4, [part], [rows]),
        (out, -1, 4, [], []),
        (out, 2**62, 4, [], []),
    ):
        with pytest.raises(ValueError, match=r"bytes in items|as many parts"):
            _dispatch.combine(*arguments)
    with pytest.raises(BufferError):
        _dispatch.combine(bytes(32), 2, 4, [], [])


@pytest.mark.parametrize("rows", [[1, 0], [1, 1]])
def test_combine_refuses_rows_that_do_not_ascend(rows: list[int]) -> None:
    out, part = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(IndexError, match="after row 1"):
        _dispatch.combine(out, 2, 4, [part], [np.array(rows, np.int64)])


def test_split_checks_its_arguments() -> None:
    ids, of, server = np.zeros((2, 2), I64), np.zeros((2, 2), I32), np.array([0], I64)
    count, rows, out = np.zeros(1, I64), np.zeros((1, 2), I64), np.zeros((1, 2, 2), I32)
    _dispatch.split(ids, of, 2, 2, server, 1, count, rows, out, 1)
    assert (count.tolist(), rows.tolist()) == ([2], [[0, 1]])
    with pytest.raises(IndexError, match="server 1 of 1"):
        _dispatch.split(ids, of, 2, 2, server + 1, 1, count, rows, out, 1)
    with pytest.raises(IndexError, match="chunk 1 of 1"):
        _dispatch.split(ids, of + 1, 2, 2, server, 1, count, rows, out, 1)
    with pytest.raises(ValueError, match="count_out"):
        _dispatch.split(ids, of, 2, 2, server, 1, count, rows, out, 2)
    with pytest.raises(ValueError, match="out of range"):
        _dispatch.split(ids, of, 2**40, 2**40, server, 1, count, rows, out, 1)


def test_level_checks_its_arguments() -> None:
    server, expert, work = np.zeros(1, I64), np.zeros(1, I64), np.ones(1, F64)
    shares, rate, ends = np.ones((2, 1), F32), np.ones(2, F64), np.zeros(2, F64)
    assert _dispatch.level(server, expert, work, 1, shares, 2, 1, rate, ends) == 0
    for wrong_server, wrong_expert in (
        (server + 2, expert),
        (server - 2, expert),
        (server, expert + 1),
    ):
        with pytest.raises(IndexError, match="chunk 0"):
            _dispatch.level(wrong_server, wrong_expert, work, 1, shares, 2, 1, rate, ends)
    with pytest.raises(ValueError, match="shares"):
        _dispatch.level(server, expert, work, 1, shares, 3, 1, rate, ends)


def test_by_share_checks_its_arguments() -> None:
    expert, out, shares = np.zeros(1, I64), np.zeros(1, I64), np.ones((2, 1), F32)
    _dispatch.by_share(expert, 1, shares, 2, 1, 0.6, 0.1, out)
    assert out.tolist() == [1]
    with pytest.raises(IndexError, match="expert 1 of 1"):
        _dispatch.by_share(expert + 1, 1, shares, 2, 1, 0.6, 0.1, out)
    for servers, draw, step in ((3, 0.6, 0.1), (2, 1.0, 0.1), (2, 0.5, -0.1), (2, np.nan, 0.1)):
        with pytest.raises(ValueError, match=r"shares|out of range"):
            _dispatch.by_share(expert, 1, shares, servers, 1, draw, step, out)
    with pytest.raises(ValueError, match="server_out"):
        _dispatch.by_share(expert, 1, shares, 2, 1, 0.6, 0.1, out.astype(I32))

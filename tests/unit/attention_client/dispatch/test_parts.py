"""Combine the results of parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.dispatch import _dispatch
from attention_client.dispatch.combine import combine
from attention_client.dispatch.parts import Part


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
    for wrong in ([2], [-1]):
        with pytest.raises(IndexError, match="of 2"):
            _dispatch.combine(out, 2, 4, [part], [np.array(wrong, I64)])
    for wrong in ([1, 0], [1, 1]):
        with pytest.raises(IndexError, match="after row 1"):
            _dispatch.combine(out, 2, 4, [np.zeros((2, 4), F32)], [np.array(wrong, I64)])
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

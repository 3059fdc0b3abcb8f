"""Rows sorted by expert, and their batches, against a plain implementation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_server.kernels.grouping import batches, group_rows

ids = st.integers(0, 12).flatmap(
    lambda tokens: st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([-1, 0, 1, 2, 7, 2**31 - 1, -5]), min_size=k, max_size=k),
            min_size=tokens,
            max_size=tokens,
        ).map(lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(tokens, k))
    )
)


@given(ids, st.sampled_from([torch.int32, torch.int64]))
def test_each_pair_once_sorted_by_expert(ids_TK: torch.Tensor, dtype: torch.dtype) -> None:
    scores_TK = torch.arange(ids_TK.numel(), dtype=torch.float32).view(ids_TK.shape)
    rows = group_rows(ids_TK.to(dtype), scores_TK)
    expected = sorted(  # Stable: pairs of an expert stay in their order.
        (
            (expert, token, float(scores_TK[token, k]))
            for token, line in enumerate(ids_TK.tolist())
            for k, expert in enumerate(line)
            if expert != -1
        ),
        key=lambda row: row[0],
    )
    starts = [0, *rows.ends]
    expert_N = [
        expert
        for expert, start, end in zip(rows.experts, starts, rows.ends, strict=False)
        for _ in range(start, end)
    ]
    assert (
        list(zip(expert_N, rows.token_N.tolist(), rows.score_N.tolist(), strict=True)) == expected
    )
    assert rows.experts == sorted(set(expert_N))
    assert rows.token_N.dtype == torch.int64
    assert rows.score_N.dtype == torch.float32


def test_any_strides() -> None:
    ids_TK = torch.tensor([[3, 1], [1, 0]]).T
    rows = group_rows(ids_TK, torch.tensor([[0.1, 0.2], [0.3, 0.4]]).T)
    assert rows.experts == [0, 1, 3]
    assert rows.token_N.tolist() == [1, 0, 1, 0]
    torch.testing.assert_close(rows.score_N, torch.tensor([0.4, 0.3, 0.2, 0.1]))


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 16))
def test_batches_cover_all_rows_in_order(sizes: list[int], limit: int) -> None:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    found = list(batches(ends, limit))
    runs = [run for batch in found for run in batch]
    row = 0
    for run in runs:
        assert run.start == row
        assert run.start < run.end <= ends[run.place]
        assert run.start >= ([0, *ends][run.place])
        row = run.end
    assert row == sum(sizes)
    assert all(batch[-1].end - batch[0].start <= limit for batch in found)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([2, 3, 4], 9, [[2, 3, 4]]),
        ([2, 3, 4], 8, [[2, 3], [4]]),  # An expert that fits into a batch stays whole.
        ([2, 11, 3], 5, [[2], [5], [5], [1, 3]]),
        ([10], 5, [[5], [5]]),
    ],
)
def test_only_large_experts_are_cut(
    sizes: list[int], limit: int, expected: list[list[int]]
) -> None:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    found = [[run.end - run.start for run in batch] for batch in batches(ends, limit)]
    assert found == expected

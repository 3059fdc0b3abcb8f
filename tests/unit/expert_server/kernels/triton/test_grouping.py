"""Rows grouped by expert and divided into tiles, against a plain loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_server.kernels.gpu.grouping import group_rows, most_tiles


@given(
    ids=st.lists(st.integers(-1, 6), max_size=200),
    tile_rows=st.sampled_from([1, 4, 16, 64]),
    extra=st.integers(0, 3),
)
def test_every_row_is_in_one_tile_of_its_expert(ids: list[int], tile_rows: int, extra: int) -> None:
    groups = group_rows(torch.tensor(ids, dtype=torch.int32).view(-1, 1), 7 + extra, tile_rows)
    order = groups.order.tolist()
    assert sorted(order) == list(range(len(ids)))
    found = []
    for expert, start, end in zip(
        groups.expert_M.tolist(), groups.start_M.tolist(), groups.end_M.tolist(), strict=True
    ):
        assert 0 <= expert < 7 + extra
        found += [(order[row], expert) for row in range(start, min(end, start + tile_rows))]
    # In the order of the experts, and of the tokens among one expert's.
    assert found == sorted(
        ((pair, expert) for pair, expert in enumerate(ids) if expert >= 0),
        key=lambda each: (each[1], each[0]),
    )


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    tile_rows=st.sampled_from([1, 16, 64]),
)
def test_the_grid_is_large_enough(counts: list[int], tile_rows: int) -> None:
    needed = sum(-(-count // tile_rows) for count in counts)
    assert needed <= most_tiles(sum(counts), len(counts), tile_rows)


def test_the_grid_of_a_small_batch_has_a_tile_for_each_row() -> None:
    assert most_tiles(8, 128, 16) == 8
    assert most_tiles(0, 128, 16) == 0

"""The order of a sum, and what it refuses beside what `test_parts` shows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import Part, combine


def test_parts_of_one_server_and_token_have_an_order_too() -> None:
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


@pytest.mark.parametrize("rows", [[1, 0], [1, 1]])
def test_rows_that_do_not_ascend_are_refused(rows: list[int]) -> None:
    out, part = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(IndexError, match="after row 1"):
        _dispatch.combine(out, 2, 4, [part], [np.array(rows, np.int64)])

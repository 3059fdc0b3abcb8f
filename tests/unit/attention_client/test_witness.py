"""Which servers computed which token, whole and in micro-batches, with failovers."""

from __future__ import annotations

import numpy as np
import pytest

from attention_client import witness as witness_module
from attention_client.attempts import Result
from attention_client.dispatch.parts import Part
from attention_client.witness import Witness


def result(server: str, rows: list[int], ids: list[list[int]]) -> Result:
    part = Part(0, np.array(rows), np.array(ids, np.int32), 1.0)
    return Result(part, np.zeros((len(rows), 1), np.float32), None, server)


LAYER = [
    result("a", [0, 2], [[3, -1], [1, 2]]),
    # The second part of one server, after another had failed.
    result("a", [2], [[-1, 7]]),
    result("b", [1, 2], [[4, 5], [6, -1]]),
]


def test_pairs_of_each_token_are_summed_over_layers_and_parts() -> None:
    witness = Witness()
    with witness.watching(True) as seen:
        witness.saw(LAYER)
        witness.saw(LAYER)
    assert seen is not None
    assert [dict(seen.of(token)) for token in range(4)] == [
        {"a": 2},
        {"b": 4},
        {"a": 6, "b": 2},
        {},
    ]
    assert dict(seen.take_last()) == {"a": 6, "b": 2}
    assert dict(seen.take_last()) == {}


def test_nobody_asks_and_nothing_is_written_down() -> None:
    witness = Witness()
    with witness.watching(False) as seen:
        assert seen is None
        witness.saw(LAYER)
    witness.saw(LAYER)


def test_a_micro_batch_counts_from_its_place_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness()
    monkeypatch.setattr(witness_module, "micro_batch_tokens", lambda: slice(10, 13))
    with witness.watching(True) as seen:
        witness.saw(LAYER)
    assert seen is not None
    assert dict(seen.of(11)) == {"b": 2}
    assert dict(seen.of(1)) == {}

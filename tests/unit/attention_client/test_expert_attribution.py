"""Expert attribution: whole batches, micro-batches, failovers."""

from __future__ import annotations

import numpy as np
import pytest

from attention_client.dispatch.parts import Part
from attention_client.layer_call import expert_attribution as attribution_module
from attention_client.layer_call.attempts import Result
from attention_client.layer_call.expert_attribution import ExpertAttribution


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
    attribution = ExpertAttribution()
    with attribution.watching(True) as seen:
        attribution.saw(LAYER)
        attribution.saw(LAYER)
    assert seen is not None
    assert [dict(seen.of(token)) for token in range(4)] == [
        {"a": 2},
        {"b": 4},
        {"a": 6, "b": 2},
        {},
    ]
    assert dict(seen.take_last()) == {"a": 6, "b": 2}
    assert dict(seen.take_last()) == {}


def test_nothing_is_recorded_without_a_request() -> None:
    attribution = ExpertAttribution()
    with attribution.watching(False) as seen:
        assert seen is None
        attribution.saw(LAYER)
    attribution.saw(LAYER)


def test_a_micro_batch_is_recorded_at_its_batch_position(monkeypatch: pytest.MonkeyPatch) -> None:
    attribution = ExpertAttribution()
    monkeypatch.setattr(attribution_module, "micro_batch_tokens", lambda: slice(10, 13))
    with attribution.watching(True) as seen:
        attribution.saw(LAYER)
    assert seen is not None
    assert dict(seen.of(11)) == {"b": 2}
    assert dict(seen.of(1)) == {}

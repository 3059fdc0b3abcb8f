"""Expert attribution: whole batches, micro-batches, failovers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from attention_client.connections.connection import Connection
from attention_client.connections.messages import Ticket
from attention_client.dispatch.parts import Part
from attention_client.layer_call import expert_attribution as attribution_module
from attention_client.layer_call.decisions import Attempt
from attention_client.layer_call.expert_attribution import ExpertAttribution


def answered(server: str, rows: list[int], ids: list[list[int]]) -> Attempt:
    part = Part(0, np.array(rows), np.array(ids, np.int32), 1.0)
    connection = cast("Connection", SimpleNamespace(server_id=server))
    return Attempt(part, connection, Ticket(0, 1, len(rows), 1.0), 0.0, 1.0, 2.0)


LAYER = [
    answered("a", [0, 2], [[3, -1], [1, 2]]),
    # The second part of one server, after another had failed.
    answered("a", [2], [[-1, 7]]),
    answered("b", [1, 2], [[4, 5], [6, -1]]),
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

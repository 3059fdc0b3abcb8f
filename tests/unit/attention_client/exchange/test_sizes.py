"""Slots and routes refuse sizes and places that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from attention_client.exchange import Route, Slots
from eaas.replicas import Replicas
from eaas.wire import Arena

HIDDEN, EXPERTS = 8, 6


def test_slots_must_lie_in_their_buffer() -> None:
    arena = Arena.create_local(2, 256, 256, 1)
    with pytest.raises(ValueError, match="buffer"):
        Slots(arena.buffer, *arena.offsets, 384, 320, 0, 9, 256, 256, 1, 0, 1, HIDDEN, True)
    with pytest.raises(ValueError, match="buffer"):
        Slots(arena.buffer, *arena.offsets, 384, 320, 0, 2, 256, 256, 1 << 20, 0, 1, HIDDEN, True)
    with pytest.raises(ValueError, match="buffer"):
        Slots(arena.buffer, *arena.offsets, 384, 320, 0, 2, 257, 256, 1, 0, 1, HIDDEN, True)
    arena.close()


def test_a_route_checks_its_sizes() -> None:
    replicas = Replicas.of(np.ones((1, 1, EXPERTS), np.bool_), np.ones((1, 1, EXPERTS)))
    held = replicas.first_LX, replicas.server_N, replicas.share_N
    with pytest.raises(ValueError, match="firsts"):
        Route(None, [None], *held, 2, EXPERTS, True, 0.1)
    with pytest.raises(ValueError, match="range"):
        Route(None, [], *held, 1, EXPERTS, True, 0.1)
    with pytest.raises(ValueError, match="range"):
        Route(None, [object()], *held, 1, EXPERTS, True, 0.1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="replicas"):
        Route(None, [None], held[0], held[1] + 1, held[2], 1, EXPERTS, True, 0.1)
    with pytest.raises(ValueError, match="replicas"):
        Route(None, [None], held[0], held[1], held[2][1:], 1, EXPERTS, True, 0.1)
    route = Route(None, [None], *held, 1, EXPERTS, True, 0.1)
    with pytest.raises(ValueError, match="load_pairs"):
        route.set_load(np.ones(1), np.zeros(1), 0.0)
    with pytest.raises(ValueError, match="rates"):
        route.set_load(np.ones(2), np.zeros(1), 16.0)
    with pytest.raises(ValueError, match="queues"):
        route.set_load(np.ones(1), np.zeros(2), 16.0)

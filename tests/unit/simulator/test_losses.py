"""What the loss of a node or a rack costs in a replay."""

from __future__ import annotations

import numpy as np
import pytest

from eaas.errors import ConfigError
from simulator.placement.compare import compare
from simulator.placement.losses import Losses, node_names
from simulator.traces import Trace


def test_names_deal_servers_to_nodes_and_racks() -> None:
    names = node_names(8, 4, 2)
    assert names[:4] == ("rack0/node0", "rack0/node0", "rack0/node1", "rack0/node1")
    assert names[4:] == ("rack1/node2", "rack1/node2", "rack1/node3", "rack1/node3")


def test_tokens_of_experts_without_another_node() -> None:
    holds_SE = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    losses = Losses(("r/a", "r/a", "r/b", "s/c"))
    assert losses.node == losses.rack == 0.0
    losses.add(holds_SE, np.array([3.0, 5.0, 2.0]))
    # Node a has expert 0 alone, and rack r experts 0 and 1.
    assert losses.node == pytest.approx(0.3)
    assert losses.rack == pytest.approx(0.8)


def test_policies_that_know_the_nodes_lose_nothing_with_two_replicas() -> None:
    rng = np.random.default_rng(1)
    trace = Trace(rng.poisson(20.0, (40, 2, 16)).astype(np.uint8))
    found = compare(
        trace, ["spread", "fractional"], servers=[8], intervals=[8], slots=32, nodes=4, racks=2
    )
    spread, fractional = found.replays
    # Until the first plan each expert has one replica.
    assert 0 < spread.losses.node < 0.1
    assert spread.losses.rack < 0.2
    assert 0 < fractional.losses.node < 0.3
    assert {"node_loss", "rack_loss"} <= found.document()["rows"][0].keys()
    with pytest.raises(ConfigError, match="9 nodes in 1 racks"):
        compare(trace, ["spread"], servers=[8], intervals=[8], nodes=9)

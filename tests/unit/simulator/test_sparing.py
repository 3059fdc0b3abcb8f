"""Spare slots in a replay: what they gain, and what their transfers take."""

from typing import Any

import numpy as np
import pytest

from balancer.policies.sparse import Layout
from eaas.errors import ConfigError
from eaas.minmax import levels
from simulator import replay
from simulator.placement.compare import compare
from simulator.placement.planners import first_layout
from simulator.placement.sparing import Serving, replay_spares
from simulator.traces import Trace, generate_trace

SERVERS, EXPERTS = 8, 32


def drift(layers: int = 3) -> Trace:
    return generate_trace(
        "drift", iterations=300, layers=layers, experts=EXPERTS, tokens=256, top_k=4
    )


def servings(trace: Trace) -> list[Serving]:
    layout = first_layout(1, SERVERS, EXPERTS)
    return [Serving(layer, 0, trace.iterations, layout) for layer in range(trace.layers)]


def split_par(trace: Trace, layout: Layout) -> Any:
    shares_SE = layout.dense()[1][0]
    mean_IL = trace.counts_ILE.sum(axis=2) / SERVERS
    level_LI = [
        levels(trace.counts_ILE[:, layer].astype(float), shares_SE) for layer in range(trace.layers)
    ]
    return np.stack(level_LI, axis=1) / mean_IL


def test_spare_slots_beat_as_many_redundant_experts() -> None:
    trace = drift()
    split, spare = (
        replay(trace, name, servers=SERVERS, interval=100)
        for name in ("fractional+split", "fractional+spare")
    )
    assert split.slots == spare.slots == EXPERTS + SERVERS
    assert spare.policy == "fractional+spare"
    assert spare.par_mean < split.par_mean
    assert spare.transit > 0
    assert (spare.par_IL >= 1 - 1e-5).all()


def test_slow_links_help_less() -> None:
    trace = drift()
    runs = [
        replay_spares(trace.counts_ILE, servings(trace), transfer_s=seconds, iteration_s=0.06)
        for seconds in (0.0, 0.06, 0.6, 6.0, 60.0)
    ]
    par = [float(run.par_IL.mean()) for run in runs]
    assert par == sorted(par)
    assert (
        par[0]
        < par[-1]
        == pytest.approx(
            float(split_par(trace, first_layout(1, SERVERS, EXPERTS)).mean()), rel=0.01
        )
    )
    # 300 iterations of 0.06 s; a link carries one expert at a time.
    for run, seconds in zip(runs[2:], (0.6, 6.0, 60.0), strict=True):
        assert run.loads_IL.sum() <= SERVERS * (18 / seconds + 1)


def test_a_replica_serves_after_its_transfer() -> None:
    # Two servers, of which one has all the load.
    counts_ILE = np.zeros((12, 1, 2), np.uint8)
    counts_ILE[:, 0, 0] = 8
    layout = Layout.of(np.eye(2, dtype=np.bool_)[None])
    for transfer_s, waits in ((0.0, 1), (1.0, 2), (2.5, 4)):
        run = replay_spares(
            counts_ILE, [Serving(0, 0, 12, layout)], transfer_s=transfer_s, iteration_s=1.0
        )
        # With one layer the next call begins when the last has ended.
        assert run.par_IL[:, 0].tolist() == [2.0] * waits + [1.0] * (12 - waits)
        assert run.loads_IL[:, 0].tolist() == [1] + [0] * 11


def test_a_link_carries_one_expert_after_another() -> None:
    # The same in four layers, whose transfers share the link of the idle server.
    counts_ILE = np.zeros((6, 4, 2), np.uint8)
    counts_ILE[:, :, 0] = 8
    layout = Layout.of(np.eye(2, dtype=np.bool_)[None])
    run = replay_spares(
        counts_ILE, [Serving(n, 0, 6, layout) for n in range(4)], transfer_s=2.0, iteration_s=4.0
    )
    # Calls are 1 s apart. At 3 s the link is busy until 5 s, and the third layer's next call is at 6 s.
    assert run.loads_IL[:2].tolist() == [[1, 1, 0, 1], [0, 0, 1, 0]]
    assert run.loads_IL.sum() == 4
    assert (run.par_IL[-1] == 1).all()


def test_a_new_placement_drops_its_replica() -> None:
    counts_ILE = np.full((4, 1, 2), 4, np.uint8)
    counts_ILE[:, 0, 0] = 8
    apart = Layout.of(np.eye(2, dtype=np.bool_)[None])
    both = Layout.of(np.ones((1, 2, 2), np.bool_))
    run = replay_spares(
        counts_ILE, [Serving(0, 0, 2, apart), Serving(0, 2, 4, both)], transfer_s=0.0
    )
    assert run.par_IL[:, 0].tolist() == [pytest.approx(4 / 3), 1, 1, 1]
    assert run.loads_IL.sum() == 1


def test_spare_slots_need_room() -> None:
    trace = drift(1)
    with pytest.raises(ConfigError, match=r"slots 39: give at least 40.*8 spare"):
        replay(trace, "eplb+spare", servers=SERVERS, interval=100, slots=39)
    with pytest.raises(ConfigError, match=r"slots 39: give at least 40.*8 spare"):
        compare(trace, ["eplb+spare"], servers=[SERVERS], intervals=[100], slots=39)
    done = replay(trace, "static+spare", servers=SERVERS, interval=100, slots=40)
    assert done.plans == 0
    assert done.transit > 0

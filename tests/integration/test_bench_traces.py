"""`eaas bench traces` in small: real processes send their spans to a collector over the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.bench.load import Workload
from eaas.bench.traces import bench_traces
from eaas.local.nursery import Nursery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sampling", [1.0, 0.0])
def test_what_is_sampled_arrives(
    checkpoint: Callable[..., Path], nursery: Nursery, sampling: float
) -> None:
    workload = Workload(requests=3, concurrency=2, prompt_tokens=4, output_tokens=5)
    document = bench_traces(
        checkpoint("qwen3_moe"),
        servers=2,
        redundancy=1,
        transport="shm",
        sampling=sampling,
        workload=workload,
        rounds=1,
        pairs=1,
        say=lambda _line: None,
        nursery=nursery,
    )
    for figure in ("decode_tokens_per_s", "cpu_ms_per_token"):
        found = document[figure]
        assert found["off"] > 0
        assert found["ratios"] == [found["ratio"]]
        assert found["ratio"] == pytest.approx(found["on"] / found["off"], rel=1e-2)
    spans = document["spans"]
    if not sampling:
        assert spans == {}
        return
    # Of two rounds, the one that warms up included.
    assert spans["request"] == 2 * workload.requests
    # Three layers, five forward passes at least, one or two servers.
    assert spans["layer"] >= 2 * 3 * workload.output_tokens
    assert spans["dispatch"] >= spans["layer"]
    # On a busy machine one that is asked anew may be in one batch with the former request, or expire.
    assert spans["layer"] / 2 < spans["server batch"] <= spans["dispatch"]

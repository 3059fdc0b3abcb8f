"""A recorded queue against its simulation, with known times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attention_client.scheduler.cost import ServerCost
from attention_client.scheduler.recording import QueueSettings, Recorder
from benchmarks.validate.compare_recording import Sizes, compare_recording
from eaas_cli.bench.load import LoadResult

STEP_S, BESIDE_S, TOKENS = 0.01, 0.005, 3
SIZES = Sizes(
    rounds=1,
    requests=20,
    prompt_tokens=8,
    output_tokens=TOKENS,
    batch_size=1,
    window_size=1,
    load=3.0,
)


class Engine:
    """One request at a time, a step of 10 ms per token at the usual pace."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        file = path.open("w")
        self.recorder = Recorder(file, lambda: self.now)
        settings = QueueSettings(
            strategy="fcfs", most_stretch=0.2, loads=1, batch_size=1, window_size=1, seed=0
        )
        self.recorder.begin(
            settings, ServerCost(np.ones((1, 1)), fixed_s=0, load_s=0, pair_s=1, steps=1)
        )
        self.tickets = 0

    def load(self, requests: int, pace: float = 1.0) -> list[float]:
        """So many come at once. Returns what each of their users waits."""
        self.now += 1.0
        began_s, e2e_s = self.now, []
        for _ in range(requests):
            self.recorder.note(add=self.tickets, load=[1.0])
            self.tickets += 1
        for _ in range(requests):
            for token in range(TOKENS):
                self.now += pace * STEP_S
                step = [0, SIZES.prompt_tokens] if token == 0 else [1, 0]
                self.recorder.note(step=step, seconds=pace * STEP_S)
                self.recorder.note(probe=0.0003 * pace)
            e2e_s.append(self.now - began_s + BESIDE_S)
        return e2e_s


@pytest.mark.parametrize("pace", [1.0, 4.0])
def test_the_http_overhead_excludes_slow_moments(tmp_path: Path, pace: float) -> None:
    """Single requests took four times as long because the machine was slow, not because of HTTP."""
    path = tmp_path / "queue.jsonl"
    engine = Engine(path)
    engine.load(4)
    alone = LoadResult(e2e_s=[wait_s for _ in range(5) for wait_s in engine.load(1, pace)])
    engine.load(SIZES.requests)
    e2e_s = engine.load(SIZES.requests)
    engine.recorder.close()
    live = LoadResult(seconds=max(e2e_s), e2e_s=e2e_s, itl_s=[STEP_S])
    (compared,) = compare_recording(path, SIZES, 64, [0.0] * SIZES.requests, 4, alone, [live])
    for kind in ("simulated", "simulated_own_steps"):
        for figure, simulated in compared[kind].items():
            assert simulated == pytest.approx(compared["live"][figure], rel=0.01), (kind, figure)

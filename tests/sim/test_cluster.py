"""A whole cluster over many seeds, in simulated time (`cluster_sim` says which parts are real).

SIM_SEED=<seed> python -m pytest tests/sim/test_cluster.py replays a failing seed exactly. CLUSTER_SEEDS is
the number of seeds; `make sim` takes 10,000.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cluster_sim import Simulation, Violation

# A core does about 20 seeds per second; `make sim` runs two halves at once.
pytestmark = pytest.mark.timeout(3600)

COUNT = int(os.environ.get("CLUSTER_SEEDS", "50"))
SEEDS = [int(os.environ["SIM_SEED"])] if "SIM_SEED" in os.environ else range(COUNT)
HALVES = (0,) if len(SEEDS) == 1 else (0, 1)
HELPERS = Path(__file__).parents[1] / "helpers"


@contextmanager
def undisturbed() -> Iterator[None]:
    """One torch thread is fastest for tensors of two numbers, and the collector finds little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        torch.set_num_threads(before)


def run(seed: int) -> Simulation:
    simulation = Simulation(seed)
    try:
        return simulation.run()
    except Exception as error:
        told = "\n".join(simulation.trace[-40:])
        raise Violation(
            f"{type(error).__name__}: {error}\nrepeat it with: "
            f"SIM_SEED={seed} python -m pytest tests/sim/test_cluster.py\n{told}"
        ) from error


@pytest.mark.parametrize("half", HALVES)
def test_row_38_any_seed_is_right_and_ends_well(half: int) -> None:
    """Row 38: 10,000 simulated seeds: any failing seed replays.

    No wrong answer, no older epoch obeyed, no two placements of one epoch, no healthy member declared DEAD,
    no error if a replica was live, no expert lost to a retirement. Once the faults are over, every request
    ends, servers hold exactly their shares, and all members follow one placement.
    """
    right = 0
    violations = []
    with undisturbed():
        for number, seed in enumerate(SEEDS[half :: len(HALVES)]):
            if number % 20 == 0:
                gc.collect()
            try:
                right += run(seed).right
            except Violation as violation:
                violations.append(str(violation))
    # Report all violations, not only the first.
    if violations:
        raise Violation("\n\n".join(violations))
    # Faults without effect would show nothing, nor would a cluster without answers.
    assert right > 10 * len(SEEDS[half :: len(HALVES)])


def test_row_38_a_seed_replays_the_identical_trace() -> None:
    """Row 38: any failing seed replays, in another process with another hash seed and after other seeds."""
    script = (
        "import gc, sys; gc.disable(); from cluster_sim import Simulation; "
        "print(*(Simulation(int(seed)).run() for seed in sys.argv[1:]), sep='\\f', end='')"
    )

    def traces(salt: str, *seeds: str) -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *seeds],
            env=os.environ
            | {"PYTHONPATH": f"{HELPERS}:{HELPERS.parents[1]}", "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.split("\f")

    one, other = traces("1", "3", "4"), traces("2", "4", "3")
    assert one == other[::-1]
    assert len(one) == len(set(one)) == 2
    for trace in one:
        assert len(trace.splitlines()) > 10

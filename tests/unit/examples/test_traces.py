"""The shipped traces: of the demo model, small, and different by domain."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from scripts import script
from simulator.traces import Trace, write_trace
from simulator.traces.readers import read_trace

EXAMPLES = Path(__file__).parents[3] / "examples"
TRACES = EXAMPLES / "traces"
DOMAINS = ("code", "prose", "german", "manual")


@pytest.fixture(scope="module")
def compare_domains() -> ModuleType:
    return script(EXAMPLES / "compare_domains.py")


@pytest.mark.parametrize("name", [*DOMAINS, "turns"])
def test_the_shipped_traces(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.npz")
    assert trace.counts_ILE.shape[1:] == (8, 32)
    assert trace.notes["model"] == "demo"
    assert trace.notes["experts"] == "in a cluster"
    # Every token goes to four experts of each layer.
    per_layer = trace.counts_ILE.sum(axis=2, dtype=np.int64)
    assert (per_layer == per_layer[:, :1]).all()
    assert (per_layer % trace.notes["top_k"] == 0).all()
    assert trace.notes["top_k"] == 4
    assert sum(path.stat().st_size for path in TRACES.glob("*.npz")) <= 300_000


def test_domains_use_different_experts(compare_domains: ModuleType) -> None:
    """Domains differ far more than two parts of one; a plan for one is worse for the others."""
    distance_DD, par_DD = compare_domains.main()
    apart = distance_DD[~np.eye(4, dtype=bool)]
    assert apart.min() > 2 * distance_DD.diagonal().max()
    # In each column the plan made for that load serves it best.
    assert (par_DD.argmin(axis=0) == np.arange(4)).all()


def test_the_comparison_sees_no_difference_between_equal_domains(
    compare_domains: ModuleType, tmp_path: Path
) -> None:
    counts_ILE = np.random.default_rng(1).poisson(5.0, (400, 2, 16)).astype(np.uint8)
    for i, domain in enumerate(DOMAINS):
        write_trace(Trace(counts_ILE[i * 100 : i * 100 + 100]), tmp_path / f"{domain}.npz")
    distance_DD, par_DD = compare_domains.main(tmp_path)
    assert distance_DD.max() < 0.05
    assert par_DD.max() < 1.1

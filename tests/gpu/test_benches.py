"""The benchmarks with --device cuda, on a GPU and with small sizes; skipped without one."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from eaas.cores import usable_cores
from helper_process import output_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).parents[2]


def document(*words: str) -> Any:
    command = (sys.executable, "-m", *words, "--device", "cuda", "--json")
    return json.loads(output_of(*command, timeout_s=220, cwd=ROOT))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_experts() -> None:
    """All are right; a bfloat16 call is not faster than the device can read."""
    shape = ["--shape", "2048,768,32,4", "--tokens", "1,64", "--rounds", "5"]
    found = document("eaas_cli", "bench", "experts", *shape)
    errors = {"bfloat16": 1e-2, "fp8": 0.1, "mxfp4": 0.5}
    assert {row["dtype"] for row in found["rows"]} == errors.keys()
    for row in found["rows"]:
        assert row["rel_error"] < errors[row["dtype"]]
        assert row["speedup"]["grouped_mm"] > 0
        assert 0 < row["roofline_fraction"] < 1.5


@pytest.mark.skipif(usable_cores() < 2, reason="the floor has a core for each side")
def test_dispatch() -> None:
    small = ["--no-server", "--transport", "shm", "--hidden", "2048", "--tokens", "1,64"]
    found = document("benchmarks.dispatch", *small, "--rounds", "2")
    for row in found["rows"]:
        assert row["device_call_us"]["p50"] > row["layer_call_us"]["p50"]

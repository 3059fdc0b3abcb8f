"""The document of `eaas bench overlap`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.local.process import program

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_document(checkpoint: Callable[..., Path]) -> None:
    done = subprocess.run(
        [*program(), "bench", "overlap", "--model", str(checkpoint("qwen3_moe")), "--json",
         "--latency", "0,3000", "--sequences", "2,6", "--steps", "8", "--rounds", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )  # fmt: skip
    document = json.loads(done.stdout)
    places = [(row["added_latency_us"], row["sequences"]) for row in document["rows"]]
    assert places == [(0, 2), (0, 6), (3000, 2), (3000, 6)]
    for row in document["rows"]:
        # Three layers, each of which waits for its experts.
        assert row["step_ms"]["off"] > 3 * row["added_latency_us"] / 1e3
        assert row["ratio"]["on"] > 0
        assert 0 <= row["overlapped"] <= 1


@pytest.mark.parametrize("option", ["--latency=x", "--latency=-1", "--sequences=0"])
def test_a_wrong_option_is_one_line(option: str) -> None:
    done = subprocess.run(
        [*program(), "bench", "overlap", option], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert option.split("=")[0] in done.stderr
    assert "Traceback" not in done.stderr

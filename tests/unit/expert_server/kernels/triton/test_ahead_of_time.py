"""The device code compiles for GPUs that are not here, and stays within what each of them has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interpreted_triton import needs_triton

pytestmark = needs_triton

HELPER = Path(__file__).parents[4] / "helpers/compile_ahead.py"
# Compute capability -> shared memory of a block, in bytes (CUDA C++ Programming Guide).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Registers of a block, and of a thread.
REGISTERS, THREAD_REGISTERS = 64 << 10, 255
PROGRAMS = 20


@pytest.fixture(scope="module")
def compiling(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[int, subprocess.Popen[str]]]:
    """A compiler per architecture, side by side."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_INTERPRET": "0",
    }
    processes = {
        architecture: subprocess.Popen(
            [sys.executable, HELPER, f"sm_{architecture}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for architecture in SHARED
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("architecture", SHARED)
def test_no_program_spills_or_needs_more_than_there_is(
    compiling: dict[int, subprocess.Popen[str]], architecture: int
) -> None:
    out, error = compiling[architecture].communicate(timeout=110)
    assert compiling[architecture].returncode == 0, error
    programs = [json.loads(line) for line in out.splitlines()]
    assert len(programs) == PROGRAMS
    for program in programs:
        assert program["spills"] == program["stack"] == 0, program
        assert program["registers"] <= THREAD_REGISTERS, program
        assert program["registers"] * program["threads"] <= REGISTERS, program
        assert program["shared"] <= SHARED[architecture], program
        is_product = program["function"] != "combine"
        # float32 is multiplied exactly, which no tensor core does.
        is_narrow = program["dtype"] == "bf16"
        assert bool(program["tensor_cores"]) is (is_product and is_narrow), program
        assert bool(program["asynchronous_copies"]) is is_product, program


def test_a_spill_is_noticed(compiling: dict[int, Any], tmp_path: Path) -> None:
    """A tile that is too large for one warp: the check sees what it looks for."""
    code = (
        "import compile_ahead as c, json\n"
        "function, dtype, constants, _ = next(iter(c.programs()))\n"
        "constants |= {'ROWS': 64, 'COLUMNS': 128}\n"
        "options = {'num_warps': 1, 'num_stages': 3}\n"
        "print(json.dumps(c.compile_for(80, function, dtype, constants, options)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
    )
    assert json.loads(done.stdout)["spills"] > 0

"""The device code compiles for GPUs that are not here, and stays within what each of them has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helper_process import output_of
from interpreted_triton import needs_triton

# Ten seconds for each architecture on a core of its own.
pytestmark = [needs_triton, pytest.mark.timeout(300)]

HELPER = Path(__file__).parents[4] / "helpers/compile_ahead.py"
# Compute capability -> shared memory of a block, in bytes (CUDA C++ Programming Guide).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Registers of a block, and of a thread.
REGISTERS, THREAD_REGISTERS = 64 << 10, 255
PROGRAMS = 20
# Only sm_80 compiles all of them in every run; at night each one does, for more tiles.
LARGEST = 8


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
            [
                sys.executable,
                HELPER,
                f"sm_{architecture}",
                *(["largest"] if architecture > 80 else []),
            ],
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
    out, error = compiling[architecture].communicate(timeout=280)
    assert compiling[architecture].returncode == 0, error
    programs = [json.loads(line) for line in out.splitlines()]
    if architecture == 80:
        assert programs.pop()["spills"] > 0, "the check sees what it looks for"
    assert len(programs) == (PROGRAMS if architecture == 80 else LARGEST)
    check(programs, architecture)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", SHARED)
def test_no_tile_that_may_be_chosen_spills(tmp_path: Path, architecture: int) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = (sys.executable, HELPER, f"sm_{architecture}", "candidates")
    printed = output_of(*command, timeout_s=1100, env=environment)
    programs = [json.loads(line) for line in printed.splitlines()]
    assert len(programs) > 2 * PROGRAMS
    check(programs, architecture)


def check(programs: Iterable[dict[str, Any]], architecture: int) -> None:
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

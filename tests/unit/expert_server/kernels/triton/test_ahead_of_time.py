"""The device code compiles for GPUs that are not here, and stays within what each of them has."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helper_process import output_of
from interpreted_triton import needs_triton

pytestmark = [needs_triton, pytest.mark.timeout(300)]

HELPER = Path(__file__).parents[4] / "helpers/compile_ahead.py"
# Compute capability -> shared memory of a block, in bytes (CUDA C++ Programming Guide).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Registers of a block, and of a thread.
REGISTERS, THREAD_REGISTERS = 64 << 10, 255
# Of the first GPU; of the others only the largest ones, and at night all of them for more tiles.
PROGRAMS, LARGEST = 20, 4


def compiled(directory: Path, timeout_s: float, *words: str) -> dict[int, list[dict[str, Any]]]:
    """Compile for GPUs; what their programs need, by architecture."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(directory), "TRITON_INTERPRET": "0"}
    printed = output_of(sys.executable, HELPER, *words, timeout_s=timeout_s, env=environment)
    found: dict[int, list[dict[str, Any]]] = {}
    for program in map(json.loads, printed.splitlines()):
        found.setdefault(program["architecture"], []).append(program)
    return found


def test_no_program_spills_or_needs_more_than_there_is(tmp_path: Path) -> None:
    found = compiled(tmp_path, 280, *(f"sm_{architecture}" for architecture in SHARED))
    assert found[80].pop()["spills"] > 0, "the check sees what it looks for"
    assert [len(programs) for programs in found.values()] == [PROGRAMS, LARGEST, LARGEST]
    for architecture, programs in found.items():
        check(programs, architecture)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", SHARED)
def test_no_tile_that_may_be_chosen_spills(tmp_path: Path, architecture: int) -> None:
    found = compiled(tmp_path, 1100, "--candidates", f"sm_{architecture}")
    assert len(found[architecture]) > 2 * PROGRAMS
    check(found[architecture], architecture)


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

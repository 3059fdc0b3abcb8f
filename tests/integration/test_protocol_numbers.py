"""Each number of the protocol, changed in turn: client, server and Python agree, since nobody restates it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from working_copy import ROOT, working_copy

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

HEADER = Path("eaas/wire/protocol.h")
SERVER = (ROOT / "tests/unit/expert_server").glob("test_*.py")
TESTS = (
    "tests/unit/eaas/wire",
    "tests/unit/attention_client/exchange",
    *(str(path.relative_to(ROOT)) for path in SERVER if "eaas.wire" in path.read_text()),
)
# It pins the protocol's bytes.
PINNED = "tests/unit/eaas/wire/test_slot.py::test_the_layout_equals_the_documentation"

# What the header says, and what it says instead: a value, an order, a size.
CHANGES = {
    "magic": (r"0x53616145u", "0x53616146u"),
    "version": (r"(#define WIRE_VERSION) 1", r"\1 3"),
    "alignment": (r"(#define WIRE_ALIGNMENT) 64", r"\1 32"),
    "checksum_flag": (r"(#define CHECKSUM_FLAG) 1", r"\1 4"),
    "detail": (r"(#define DETAIL_DAMAGED) 1", r"\1 7"),
    "states": (r"FREE = 0, (\w+) = 1, (\w+) = 2, (\w+) = 3", r"FREE = 3, \1 = 0, \2 = 1, \3 = 2"),
    "dtypes": (r"FLOAT32 = 0, (\w+) = 1, (\w+) = 2", r"FLOAT32 = 2, \1 = 0, \2 = 1"),
    "statuses": (r"OK = 0,(\s+\w+) = 1,(\s+\w+) = 2", r"OK = 2,\1 = 0,\2 = 1"),
    "request_places": (
        r"(?s)( +uint64_t request_id;\n +uint64_t epoch;.*?)zeros\[40\]",
        r"    uint64_t gap;\n\1zeros[32]",
    ),
    "request_size": (r"zeros\[40\]", "zeros[104]"),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_copy(tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_number_changes_it_everywhere(clone: Path, change: str) -> None:
    former = (ROOT / HEADER).read_text()
    changed, count = re.subn(*CHANGES[change], former)
    assert count > 0, "the header says something else"
    (clone / HEADER).write_text(changed)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=clone, check=True, timeout=300, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "--deselect", PINNED, *TESTS],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]

"""Client and server with sanitizers in their C: no data race, no wrong access, nothing undefined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from working_copy import working_copy

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

# The compiled kernels take minutes to build so, and share no memory with other processes.
FOLDERS = (
    "eaas/wire",
    "attention_client/dispatch",
    "attention_client/exchange",
    "expert_server/loop",
)
CLIENT, SERVER = "tests/unit/attention_client", "tests/unit/expert_server"
TESTS = (
    f"{CLIENT}/exchange",
    f"{CLIENT}/dispatch",
    f"{CLIENT}/test_connection.py",
    f"{CLIENT}/test_layer_call_start.py",
    f"{CLIENT}/transports/test_exchange.py",
    f"{SERVER}/test_loop.py",
    f"{SERVER}/test_lone_requests.py",
    f"{SERVER}/test_contract.py",
    "tests/unit/eaas/wire",
    "tests/sim/test_cluster.py",
)
# Sanitizers -> the library to load before Python, which is built without them.
LIBRARIES = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
# gRPC's own synchronisation is not seen.
FOREIGN = "race:cygrpc\ncalled_from_lib:cygrpc.cpython*\n"


@pytest.fixture(scope="module", params=LIBRARIES)
def clone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working copy whose compiled data path has sanitizers; `preload` beside it names their library."""
    clone = working_copy(tmp_path_factory.mktemp("clone"))
    for module in (path for folder in FOLDERS for path in (clone / folder).glob("*.so")):
        module.unlink()
    option = f"-fsanitize={request.param}"
    flags = {"CFLAGS": f"{option} -fno-omit-frame-pointer -g", "LDFLAGS": option}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(
        build, cwd=clone, env=os.environ | flags, check=True, timeout=600, capture_output=True
    )
    library = LIBRARIES[request.param]
    found = subprocess.check_output(["cc", f"-print-file-name={library}"], text=True)
    (clone / "preload").write_text(found.strip())
    (clone / "foreign").write_text(FOREIGN)
    return clone


@pytest.mark.parametrize("tests", TESTS)
def test_the_compiled_data_path_is_clean(clone: Path, tests: str) -> None:
    options = {
        "PYTHONPATH": str(clone),
        "LD_PRELOAD": (clone / "preload").read_text(),
        # Python itself frees little at its end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": f"exitcode=0 suppressions={clone / 'foreign'}",
        "CLUSTER_SEEDS": "50",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", tests],
        cwd=clone,
        env=os.environ | options,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    said = ran.stdout + ran.stderr
    # A report names the lines of our C on its way; libraries without sanitizers seem to race.
    reports = [r for r in said.split("=" * 18) if re.search("Sanitizer|runtime error:", r)]
    ours = [report for report in reports if any(f"{folder}/" in report for folder in FOLDERS)]
    assert not ours, ours[0]
    assert ran.returncode == 0, ran.stdout[-6000:]

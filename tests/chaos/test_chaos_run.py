"""Row 37 of the fault contract: a short `eaas chaos run`. `make soak` is the long one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eaas_cli.chaos import run_chaos
from eaas_cli.chaos.history import Settings
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.interrupt import Interrupt
from waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_row_37_random_faults_under_load(
    checkpoint: object, fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 37: an hour of random faults under load, seeded: resident memory, descriptors and slots flat; every
    answer right. (8 seconds here; `make soak` for longer.)
    """
    kinds = ("kill", "hang", "slow", "pause", "balancer", "rebalance", "damaged")
    said: list[str] = []
    with Interrupt() as interrupt:
        document = run_chaos(
            checkpoint(),  # type: ignore[operator]
            Settings(seed=1, seconds=8.0, kinds=kinds),
            interrupt=interrupt,
            say=said.append,
            fork_server=fork_server,
        )
    assert document["violations"] == [], said
    requests = document["requests"]
    assert requests["right"] == requests["asked"] > 20
    assert requests["errors"] == 0
    told = [line for line in said if "whole again" in line]
    assert len(document["incidents"]) == len(told) >= 2
    assert all(i["recovery_s"] is not None for i in document["incidents"])
    assert json.loads(json.dumps(document)) == document
    assert document["repeat"].startswith(
        "eaas chaos run --seed 1 --minutes 0.133333 --faults kill,"
    )


def namespaces(pid: int) -> list[Path]:
    """Existing namespaces of one process; others may belong to another test."""
    number = re.compile(r"eaas-(\d+)").fullmatch
    own = {(pid + 997 * i) % (1 << 14) for i in range(3)}
    return [
        path
        for path in Path("/run").glob("netns/*")
        if (match := number(path.name)) and int(match[1]) in own
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["it starts", "a fault"])
def test_ctrl_c_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "eaas_cli", "chaos", "run", "--minutes", "5", "--rate", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        process_group=0,
    ) as run:
        assert run.stderr is not None
        process = psutil.Process(run.pid)
        eventually(lambda: process.children(recursive=True), what="its start")
        if when == "a fault":
            assert run.stderr.readline() == "warming up ...\n"
            # The first faults, which the command does not announce.
            time.sleep(0.8)
        family = process.children(recursive=True)
        # Only root may make namespaces.
        assert namespaces(run.pid) or os.geteuid() != 0 or when == "it starts"
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 130, told
    assert "Traceback" not in told
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    # Torch makes this directory.
    assert {path.name for path in tmp_path.iterdir()} <= {"torchinductor_root"}
    assert namespaces(run.pid) == []

"""`eaas chaos run`, short: row 37 of the fault contract. `make soak` is the long one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eaas.chaos import run_chaos
from eaas.chaos.run import Settings
from eaas.local.interrupt import Interrupt
from eaas.local.nursery import Nursery

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(300)]


def test_row_37_random_faults_under_load(
    checkpoint: object, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 37: an hour of random faults under load, seeded: resident memory, descriptors and slots flat; every
    answer right. (12 seconds here; `make soak` for longer.)
    """
    kinds = ("kill", "hang", "slow", "monitor", "balancer", "rebalance")
    said: list[str] = []
    with Interrupt() as interrupt:
        document = run_chaos(
            checkpoint(),  # type: ignore[operator]
            Settings(seed=1, seconds=12.0, kinds=kinds),
            interrupt=interrupt,
            say=said.append,
            nursery=nursery,
        )
    assert document["violations"] == [], said
    requests = document["requests"]
    assert requests["right"] == requests["asked"] > 20
    assert requests["errors"] == 0
    assert len(document["incidents"]) == len(said) >= 4
    assert all(i["recovery_s"] is not None for i in document["incidents"])
    assert json.loads(json.dumps(document)) == document
    assert document["repeat"].startswith("eaas chaos run --seed 1 --minutes 0.2 --faults kill,")


@pytest.mark.parametrize("after_s", [1.0, 9.0])
def test_ctrl_c_leaves_nothing_behind(after_s: float, tmp_path: Path) -> None:
    """While it starts, and in the middle of faults."""
    before = set(os.listdir("/run/netns")) if Path("/run/netns").exists() else set()
    scratch = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "eaas", "chaos", "run", "--minutes", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=scratch,
        process_group=0,
    ) as run:
        time.sleep(after_s)
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 130, told
    assert b"Traceback" not in told
    gone, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert len(gone) >= 1
    assert list(tmp_path.iterdir()) == []
    after = set(os.listdir("/run/netns")) if Path("/run/netns").exists() else set()
    assert after <= before

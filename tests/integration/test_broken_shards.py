"""Row 26 of the fault contract: a server with a broken checkpoint, beside others that serve."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from eaas.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
SHARD = "model.safetensors"


def truncate(directory: Path) -> str:
    """The last tensor's end is not there."""
    shard = directory / SHARD
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 8)
    return f"{SHARD}: tensor"


def bloat(directory: Path) -> str:
    """The header says that it is larger than any file."""
    with (directory / SHARD).open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 60))
    return f"{SHARD}: "


def corrupt(directory: Path) -> str:
    """Bytes in the middle of the header."""
    with (directory / SHARD).open("r+b") as file:
        file.seek(8 + 16)
        file.write(b"\xff" * 32)
    return f"{SHARD}: "


def pickle(directory: Path) -> str:
    (directory / SHARD).rename(directory / "pytorch_model.bin")
    return "pickles"


@pytest.mark.parametrize("breaks", [truncate, bloat, corrupt, pickle])
def test_row_26_a_broken_shard(
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
    breaks: Callable[[Path], str],
) -> None:
    """Row 26: shard corrupted, truncated or with a bloated header; a pickle file: refused before SERVING,
    the file and tensor named; other experts serve.
    """
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint(), broken)
    words = breaks(broken)
    cluster = start_cluster(checkpoint(), servers=2)
    ended = subprocess.run(
        [sys.executable, "-m", "eaas", "expert-server", "--model", str(broken)]
        + ["--join", cluster.monitor_address, "--id", "broken"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2, ended.stderr
    assert last.startswith("eaas: error: ")
    assert words in last
    told = httpx.get(f"{cluster.endpoint}/eaas/v1/status").json()
    assert "broken" not in {member["id"]: member for member in told["members"]}
    answer: Any = httpx.post(
        f"{cluster.endpoint}/v1/completions", json={"prompt": "Hello", "max_tokens": 4}, timeout=60
    )
    assert answer.status_code == 200

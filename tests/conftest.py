"""Checkpoints and clusters that many tests share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from eaas.config import ClusterConfig, load_config
from eaas.local import LocalCluster
from eaas.local.nursery import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, Nursery
from eaas.local.process import wait_ready

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers with a thread for each core each would wait for one another, spinning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# For helpers that tests run as programs of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).with_name("helpers")), os.environ.get("PYTHONPATH")))
)

# Records of the servers that tests start are theirs, and go with them.
_runtime = tempfile.TemporaryDirectory(prefix="eaas-tests-")
os.environ["XDG_RUNTIME_DIR"] = _runtime.name

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a script Ctrl-C is ignored, also by all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes long says something of the machine's load only.
hypothesis.settings.register_profile("eaas", deadline=None)
hypothesis.settings.load_profile("eaas")

# Hardly anything that the imports of torch, transformers and all test files make is garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported by now stays: no collection need look at it again."""
    gc.freeze()
    gc.enable()


ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) a small checkpoint of an architecture."""
    made: dict[str, Path] = {}

    def make(arch: str = "qwen3_moe") -> Path:
        if arch not in made:
            from eaas.demo_model import write_demo_model

            made[arch] = tmp_path_factory.mktemp("checkpoints") / arch
            write_demo_model(made[arch], arch=arch, layers=3, hidden=64, experts=8, top_k=2, seed=1)
        return made[arch]

    return make


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks the processes of all clusters: torch is imported once, not for each of them."""
    nursery = Nursery(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES)
    try:
        wait_ready([nursery], 120)
        yield nursery
    finally:
        nursery.end()


@pytest.fixture(scope="session", params=ARCHITECTURES)
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], nursery: Nursery
) -> Iterator[tuple[Path, LocalCluster]]:
    """Each architecture in turn, served by three servers; the test itself is the attention client."""
    import torch

    torch.set_num_threads(1)
    path = checkpoint(request.param)
    with LocalCluster(path, attention_client=False, nursery=nursery) as cluster:
        yield path, cluster


@pytest.fixture
def settings() -> Callable[..., ClusterConfig]:
    """Settings with a free port for the endpoint."""

    def make(**attention_client: object) -> ClusterConfig:
        return load_config(attention_client={"port": 0, **attention_client})

    return make


@pytest.fixture
def start_cluster(
    settings: Callable[..., ClusterConfig], tmp_path: Path, nursery: Nursery
) -> Iterator[Callable[..., LocalCluster]]:
    """Starts clusters that end with the test."""
    started: list[LocalCluster] = []

    def start(model: Path, **options: Any) -> LocalCluster:
        options = {"config": settings(), "nursery": nursery} | options
        cluster = LocalCluster(model, log_dir=tmp_path / f"logs-{len(started)}", **options)
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()

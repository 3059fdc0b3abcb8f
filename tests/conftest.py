"""Shared checkpoints and clusters, hypothesis profiles, and the directories of the nightly tier."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from eaas.config import load_config
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, ForkServer
from eaas_cli.local.process import wait_ready

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each have a thread for every core would spin while they wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# For helpers that tests run as programs.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).with_name("helpers")), os.environ.get("PYTHONPATH")))
)

# Server records of the tests are kept apart from the user's, and are removed at the end.
_runtime = tempfile.TemporaryDirectory(prefix="eaas-tests-")
os.environ["XDG_RUNTIME_DIR"] = _runtime.name
os.environ["XDG_CACHE_HOME"] = str(Path(_runtime.name, "cache"))

# Clients of the tests' own call clusters on loopback.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "localhost,127.0.0.1,::1")))

# A compilation takes a core for half a minute. The tests of compiled passes turn it on.
os.environ["EAAS_ATTENTION_CLIENT__COMPILE"] = "false"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell script starts background jobs with Ctrl-C ignored, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the time of one example depends on the machine's load. `--hypothesis-profile nightly` takes the
# second one. A test that names its own number of examples keeps it.
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("default")

# Every test below these directories is nightly.
NIGHTLY = tuple(Path(__file__).with_name(tier) / "benchmarks" for tier in ("integration", "unit"))

# Imports of torch, transformers and the test files create hardly any garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let Triton's bindings end: they would print what is exempt as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the nightly directories before `-m` selects."""
    for item in items:
        if any(item.path.is_relative_to(directory) for directory in NIGHTLY):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """Callbacks for the end of the test."""
    with ExitStack() as stack:
        yield stack


ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a small checkpoint of an architecture, once per session."""
    made: dict[str, Path] = {}

    def make(
        arch: str = "qwen3_moe", dtype: str = "float32", shard_size: str = "1MB", layers: int = 3
    ) -> Path:
        name = f"{arch}-{dtype}-{shard_size}-{layers}"
        if name not in made:
            from eaas_cli.demo_model import write_demo_model

            made[name] = tmp_path_factory.mktemp("checkpoints") / name
            sizes: dict[str, Any] = {"layers": layers, "hidden": 64, "experts": 8, "top_k": 2}
            sizes |= {"seed": 1, "max_shard_size": shard_size}
            write_demo_model(made[name], arch=arch, dtype=dtype, **sizes)
        return made[name]

    return make


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Fork server for the processes of all clusters: torch is imported once, not once per process."""
    modules = CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES
    fork_server = ForkServer((*modules, "frontend.main"))
    try:
        wait_ready([fork_server], 120)
        yield fork_server
    finally:
        fork_server.end()


@pytest.fixture(scope="session", params=ARCHITECTURES)
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], fork_server: ForkServer
) -> Iterator[tuple[Path, LocalCluster]]:
    """Each architecture in turn on three expert servers; the test is the attention client."""
    import torch

    torch.set_num_threads(1)
    path = checkpoint(request.param)
    with LocalCluster(path, clients=0, fork_server=fork_server) as cluster:
        yield path, cluster


@pytest.fixture
def start_cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., LocalCluster]]:
    """Start clusters that end with the test; clients read the settings `client` from a file."""
    started: list[LocalCluster] = []

    def start(model: Path, client: dict[str, object] | None = None, **options: Any) -> LocalCluster:
        # Here, so that the settings are those of the environment that the test has made.
        options = {
            "config": load_config(frontend={"port": 0}),
            "fork_server": fork_server,
        } | options
        if client is not None:
            file = tmp_path / f"cluster-{len(started)}.yaml"
            file.write_text(json.dumps({"frontend": {"port": 0}, "attention_client": client}))
            options |= {"config": load_config(file), "config_file": file}
        cluster = LocalCluster(model, log_dir=tmp_path / f"logs-{len(started)}", **options)
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()

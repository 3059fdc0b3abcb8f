"""The base install, without extras, makes layer calls and imports none of the extras' packages."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig
from eaas_cli.local import LocalCluster

# It installs torch into a new environment.
pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "*.so", "tests")

LAYER_CALL = """
import importlib.util, json, sys
import torch
from prometheus_client import CollectorRegistry
import attention_client
from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.config import AttentionClientConfig
from eaas.types import ModelShape

monitor, fields, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
shape = ModelShape(**fields | {"layer_names": tuple(fields["layer_names"])})
cluster = Cluster(monitor, shape, AttentionClientConfig(), ClientMetrics(CollectorRegistry()))
cluster.wait_until_covered(60.0)
out_TH = cluster.layer_call(0, *map(torch.tensor, arguments), None)
cluster.close()
extras = [name for name in ("transformers", "starlette", "typer") if importlib.util.find_spec(name)]
loaded = [name for name in sys.modules if name in ("transformers", "starlette", "typer")]
file = attention_client.__file__
print(json.dumps({"out": out_TH.tolist(), "installed": extras, "loaded": loaded, "file": file}))
"""


def run(*command: object, cwd: Path, timeout_s: float) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has this project's wheel and its base dependencies."""
    place = tmp_path_factory.mktemp("base")
    # A copy, since a build writes into its source.
    source = Path(shutil.copytree(ROOT, place / "source", ignore=NOT_COPIED))
    build = ("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", place)
    run(sys.executable, *build, cwd=source, timeout_s=300)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    constraints = source / "constraints.txt"
    pinned = ("--constraint", constraints) if constraints.exists() else ()
    run(python, "-m", "pip", "install", "--quiet", wheel, *pinned, cwd=place, timeout_s=900)
    return python


def test_a_layer_call_needs_the_base_install_only(
    base_python: Path, checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = start_cluster(checkpoint(), servers=1, redundancy=1, clients=0)
    shape = Checkpoint.open(cluster.model).shape
    dice = torch.Generator().manual_seed(1)
    x_TH = torch.randn(4, shape.hidden_size, generator=dice)
    ids_TK = torch.rand(4, shape.num_experts, generator=dice).argsort(dim=1)[:, : shape.top_k]
    scores_TK = torch.rand(4, shape.top_k, generator=dice)
    metrics = ClientMetrics(CollectorRegistry())
    own = Cluster(cluster.monitor_address, shape, AttentionClientConfig(), metrics)
    with closing(own):
        own.wait_until_covered(60.0)
        expected_TH = own.layer_call(0, x_TH, ids_TK, scores_TK, None)
    said = run(
        *(base_python, "-I", "-c", LAYER_CALL, cluster.monitor_address),
        json.dumps(dataclasses.asdict(shape)),
        json.dumps([each.tolist() for each in (x_TH, ids_TK, scores_TK)]),
        cwd=base_python.parent,
        timeout_s=120,
    )
    answer = json.loads(said.splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(base_python.parents[1])
    assert torch.allclose(torch.tensor(answer["out"]), expected_TH, rtol=1e-4, atol=1e-5)
    assert answer["loaded"] == []
    assert answer["installed"] == []

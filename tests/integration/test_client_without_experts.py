"""An attention client neither reads nor holds the experts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention_client.engines.transformers.model import load_model
from eaas.checkpoint import Checkpoint
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
EXPERTS, REST = "experts.safetensors", "rest.safetensors"


class NoExperts:
    """A cluster whose experts add nothing."""

    def layer_call(self, layer: int, x_TH: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(x_TH.shape)


def split(path: Path) -> int:
    """Move the experts of a checkpoint into their own shard; return its size in bytes."""
    expert_keys = Checkpoint.open(path).expert_keys()
    tensors: dict[str, torch.Tensor] = {}
    for shard in path.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    weight_map = {name: EXPERTS if name in expert_keys else REST for name in tensors}
    for shard_name in (EXPERTS, REST):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard_name}
        save_file(part, path / shard_name, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return (path / EXPERTS).stat().st_size


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = load_model(checkpoint, NoExperts())  # type: ignore[arg-type]
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(20, 40)[None]).logits
    return out


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_experts_shard_is_not_opened(tmp_path: Path, arch: str) -> None:
    """The shard is deleted before the weights are loaded."""
    path = tmp_path / arch
    write_demo_model(path, arch=arch, layers=2, hidden=64, experts=8, top_k=2)
    expected = logits(Checkpoint.open(path))
    split(path)
    checkpoint = Checkpoint.open(path)
    (path / EXPERTS).unlink()
    assert torch.equal(logits(checkpoint), expected)


@pytest.fixture
def large(tmp_path: Path, fork_server: ForkServer) -> Iterator[tuple[Path, int, LocalCluster]]:
    path = tmp_path / "large"
    write_demo_model(
        path, layers=2, hidden=256, experts=96, top_k=2, vocab=300, max_shard_size="1GB"
    )
    size = split(path)
    with LocalCluster(path, servers=1, redundancy=1, clients=0, fork_server=fork_server) as cluster:
        yield path, size, cluster


def test_memory(large: tuple[Path, int, LocalCluster], checkpoint: Callable[..., Path]) -> None:
    path, size, cluster = large
    assert size > 60e6
    assert size > 15 * (path / REST).stat().st_size
    # A small model first, so that imports and a first pass do not count as growth.
    code = """
import json, sys
import torch
import attention_client.engines.transformers.loading
from attention_client.engines.transformers.first_pass import check_first_pass
from attention_client.engines.transformers.model import load_model
from eaas.checkpoint import Checkpoint

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return 1024 * int(line.split()[1])

torch.set_num_threads(1)
small, path, monitor = sys.argv[1:]
checkpoint = Checkpoint.open(small)
warm = load_model(checkpoint, None)
check_first_pass(warm, checkpoint)
before = resident()
model = attention_client.load(path, monitor)
grown = resident() - before
mapped = [line for line in open("/proc/self/maps") if "experts.safetensors" in line]
weights = sum(p.nbytes for p in model.parameters())
model.generate(torch.arange(20, 30)[None], max_new_tokens=4, do_sample=False)
print(json.dumps([grown, len(mapped), weights, resident() - before]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, checkpoint("qwen3_moe"), path, cluster.monitor_address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    grown, mapped, weights, grown_after_use = json.loads(done.stdout.splitlines()[-1])
    assert mapped == 0
    assert weights < size / 15
    assert grown < size / 4
    assert grown_after_use < size / 2

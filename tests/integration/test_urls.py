"""Expert servers that read their experts from a URL, beside servers with a checkpoint and without one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chaos_world import ChaosWorld, Client, same
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.files import read_files
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import wait_ready
from expert_server.weights.reader import ExpertReader
from quantized_checkpoint import SCHEMES, quantized_copy
from range_server import RangeServer
from refusals import refusal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PATIENCE_S = 60.0


@pytest.fixture
def world(
    checkpoint: Callable[..., Path], tmp_path: Path, fork_server: ForkServer
) -> Iterator[ChaosWorld]:
    with ExitStack() as stack:
        yield ChaosWorld(stack, checkpoint(), tmp_path, fork_server)


@pytest.fixture(params=["qwen3_moe", "mxfp4"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    if request.param != "mxfp4":
        return checkpoint(request.param)
    quantized_copy(checkpoint("gpt_oss"), tmp_path / "mxfp4", SCHEMES["mxfp4"])
    return tmp_path / "mxfp4"


def layers(client: Client) -> list[torch.Tensor]:
    """One call for each layer, with every expert of the model."""
    return [client.layer(tokens=64, layer=layer) for layer in range(client.shape.num_layers)]


def start(world: ChaosWorld, model: Path, redundancy: int, **servers: str) -> SimpleNamespace:
    """A cluster: name of each expert server -> its --model."""
    monitor = world.child("monitor", "monitor")
    wait_ready([monitor], PATIENCE_S)
    cluster = SimpleNamespace(model=model, monitor_address=str(monitor.address))
    join = ("--join", cluster.monitor_address)
    counts = ("--servers", str(len(servers)), "--redundancy", str(redundancy))
    world.child("balancer", "balancer", *join, *counts)
    cluster.children = {
        name: world.child(name, "expert-server", "--id", name, *join, "--model", place)
        for name, place in servers.items()
    }
    wait_ready(list(cluster.children.values()), 2 * PATIENCE_S)
    return cluster


def held_by(client: Client, name: str) -> list[list[int]]:
    """The experts of each layer that a server holds."""
    placement = client.cluster.placement
    holds_LE = placement.holds_LSE[:, placement.servers.index(name)]
    return [row.nonzero()[0].tolist() for row in holds_LE]


def test_only_the_experts_of_its_placement_are_sent(world: ChaosWorld, model: Path) -> None:
    """Answers are bit-equal to those of two servers with the checkpoint on their disks."""
    client = world.join(start(world, model, 1, here=str(model), there=str(model)), 2)
    expected, own = layers(client), held_by(client, "there")
    with RangeServer(model) as server:
        client = world.join(start(world, model, 1, here=str(model), there=server.url), 2)
        held = held_by(client, "there")
        assert held == own
        for found_TH, expected_TH in zip(layers(client), expected, strict=True):
            assert torch.equal(found_TH, expected_TH)
    checkpoint, files = Checkpoint.open(model), read_files(model)
    reader = ExpertReader(checkpoint)
    experts = sum(len(some) * reader.expert_bytes(layer) for layer, some in enumerate(held))
    assert 0 < experts < sum(reader.expert_bytes(layer) * 8 for layer in range(len(held)))
    texts = {"config.json", "model.safetensors.index.json"} & set(server.sent)
    assert set(server.sent) == texts | set(files.headers)
    others = checkpoint.stored_keys(checkpoint.other_keys())
    opened = sum((model / name).stat().st_size for name in texts)
    opened += sum(header.nbytes for header in files.headers.values())
    # The digest of the model has the beginnings of all other tensors.
    opened += sum(min(files.tensors[key].nbytes, 4096) for key in others)
    assert server.sent.total() == opened + experts


def test_replicas_from_disk_url_and_peers_mix(
    world: ChaosWorld, checkpoint: Callable[..., Path]
) -> None:
    """The balancer compares the replicas' digests, at a cold start and when a server joins."""
    model = checkpoint()
    with RangeServer(model) as server:
        cluster = start(world, model, 2, disk=str(model), url=server.url)
        client = world.join(cluster, 2)
        assert held_by(client, "url") == [list(range(8))] * client.shape.num_layers
        expected = layers(client)
        wait_ready([world.by_hand(cluster, "peers", None)], PATIENCE_S)
        client.wait(3)
        assert sum(map(len, held_by(client, "peers"))) > 0
    for _ in range(2):
        for found_TH, expected_TH in zip(layers(client), expected, strict=True):
            assert same(found_TH, expected_TH)
        cluster.children["disk"].signal(signal.SIGKILL)


def test_a_url_that_cannot_be_read_ends_the_server(
    world: ChaosWorld, checkpoint: Callable[..., Path]
) -> None:
    """With one line that has no credentials, before it joins."""
    with RangeServer(checkpoint()) as server:
        server.fault = lambda _method, name, _: 403 if name.endswith(".safetensors") else None
        url = server.url.replace("://", "://me:secret@") + "?token=secret"
        child = world.child(
            "url", "expert-server", "--id", "url", "--join", "127.0.0.1:1", "--model", url
        )
        why = refusal(child)
    assert f"{server.url}/" in why
    assert "secret" not in why

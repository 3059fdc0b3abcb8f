"""Row 39 of the fault contract: servers with a damaged copy of the checkpoint, on real processes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chaos_world import ChaosWorld, Client, same
from damaged_copy import damage, damaged_copy, expert_keys
from eaas.types import MemberState
from eaas_cli.local.process import ChildProcess, wait_ready
from refusals import refusal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

PATIENCE_S = 60.0


def refused(child: ChildProcess, *named: str) -> None:
    """It ends before it serves, with one line that names the reason."""
    why = refusal(child)
    for word in (*named, ".safetensors", ": tensor ", "differs from the cluster's other replicas"):
        assert word in why, why
    assert "copy the checkpoint again" in why


def states(client: Client, name: str) -> list[MemberState]:
    """The current state of a member, or nothing."""
    members = client.cluster.session.view.members
    return [members[name].state] if name in members else []


def layers(client: Client) -> list[torch.Tensor]:
    """One call for each layer, with every expert of the model."""
    return [client.layer(tokens=64, layer=layer) for layer in range(client.shape.num_layers)]


def assert_right(client: Client, expected: list[torch.Tensor]) -> None:
    for found_TH, expected_TH in zip(layers(client), expected, strict=True):
        assert same(found_TH, expected_TH)


@pytest.mark.parametrize("arch", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_row_39_a_damaged_copy_joins_a_cluster_that_serves(
    chaos: ChaosWorld, arch: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Row 39: a server on a damaged copy of the checkpoint joins: refused before SERVING, the file and the
    tensor named; other servers serve.
    """
    model = checkpoint(arch)
    cluster = chaos.start(model=model, servers=2, redundancy=2)
    client = chaos.join(cluster, 2)
    expected = layers(client)
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model, layer=1))
    before = client.cluster.placement
    refused(chaos.by_hand(cluster, "damaged", copy), str(copy), "layer 1")
    client.until(lambda: MemberState.LEFT in states(client, "damaged"))
    assert_right(client, expected)
    after = client.cluster.placement
    assert after.servers == before.servers
    assert (after.holds_LSE == before.holds_LSE).all()
    # An intact copy is accepted under the same name.
    wait_ready([chaos.by_hand(cluster, "damaged", model)], PATIENCE_S)
    client.wait(3)
    assert_right(client, expected)


def test_row_39_one_bit_after_a_server_and_the_balancer_were_lost(
    chaos: ChaosWorld, tmp_path: Path
) -> None:
    """Row 39: one bit of one expert; a balancer that was restarted learns the digests from live servers."""
    model = chaos.model
    cluster = chaos.start(servers=2, redundancy=2)
    client = chaos.join(cluster, 2)
    expected = layers(client)
    for name in ("expert-server-1", "balancer"):
        cluster.children[name].signal(signal.SIGKILL)
    cluster.restart("balancer")
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model)[-1:])
    # With two live servers and redundancy 2 it would hold every expert.
    child = chaos.by_hand(cluster, "damaged", copy)
    refused(child, expert_keys(model)[-1], f"expert {client.shape.num_experts - 1}")
    assert_right(client, expected)


@pytest.mark.parametrize("place", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_row_39_a_damaged_copy_among_the_servers_of_a_cold_start(
    chaos: ChaosWorld, place: int, tmp_path: Path
) -> None:
    """Row 39: at a cold start nothing is known: the copy that the others contradict is refused."""
    model = chaos.model
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model))
    expected = layers(chaos.join(chaos.start(servers=1, redundancy=1), 1))
    monitor = chaos.child("monitor", "monitor")
    wait_ready([monitor], PATIENCE_S)
    cluster = SimpleNamespace(model=model, monitor_address=str(monitor.address))
    chaos.child("balancer", "balancer", "--join", cluster.monitor_address, "--servers", "3")
    servers = [chaos.by_hand(cluster, f"s{i}", copy if i == place else model) for i in range(3)]
    damaged = servers.pop(place)
    wait_ready(servers, PATIENCE_S)
    client = chaos.join(cluster, 2)
    assert_right(client, expected)
    refused(damaged, str(copy))
    assert_right(client, expected)


def test_row_39_weights_by_peers_of_which_one_has_a_damaged_copy(
    chaos: ChaosWorld, tmp_path: Path
) -> None:
    """Row 39: a server without a checkpoint takes no wrong bytes from a peer: it asks another one, and is
    refused if all peers send the same.
    """
    model = chaos.model
    first, second = (shutil.copytree(model, tmp_path / name) for name in ("first", "second"))
    cluster = chaos.start(model=first, servers=1, redundancy=1)
    client = chaos.join(cluster, 1)
    expected = layers(client)
    wait_ready([chaos.by_hand(cluster, "second", second)], PATIENCE_S)
    client.wait(2)
    # The server read its own experts before the damage; it reads again what it sends.
    damage(first, expert_keys(first))
    wait_ready([chaos.by_hand(cluster, "guest", None)], PATIENCE_S)
    client.wait(3)
    assert_right(client, expected)
    damage(second, expert_keys(second))
    refused(chaos.by_hand(cluster, "late", None))
    assert_right(client, expected)

"""Row 39 of the fault contract: servers with a damaged copy of the checkpoint, on real processes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from damaged_copy import damage, damaged_copy, expert_keys
from eaas.errors import EaasError
from eaas.types import MemberState
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

PATIENCE_S = 60.0


@dataclass
class Parts:
    """A cluster whose processes the test starts one by one."""

    model: Path
    monitor_address: str


@pytest.fixture
def by_hand(fork_server: ForkServer) -> Iterator[Callable[..., ChildProcess]]:
    """Start expert servers as an operator does, with or without their own checkpoint."""
    with ExitStack() as stack:

        def start(cluster: LocalCluster | Parts, name: str, model: Path | None) -> ChildProcess:
            words = ["expert-server", "--id", name, "--join", cluster.monitor_address]
            words += ["--model", str(model)] if model else []
            child = ChildProcess(name, words, None, fork_server=fork_server)
            stack.callback(stop_all, [child], at_once=True)
            return child

        yield start


@pytest.fixture
def running(fork_server: ForkServer) -> Iterator[Callable[..., LocalCluster]]:
    """Start clusters; the test is the client."""
    with ExitStack() as stack:

        def start(model: Path, **options: Any) -> LocalCluster:
            cluster = LocalCluster(
                model, attention_client=False, fork_server=fork_server, **options
            )
            return stack.enter_context(cluster)

        yield start


def refused(child: ChildProcess, *named: str) -> None:
    """It ends with exit code 2 before it serves, with one line that names the reason."""
    with pytest.raises(EaasError) as caught:
        wait_ready([child], PATIENCE_S)
    why = str(caught.value)
    assert "\n" not in why
    for word in (*named, ".safetensors: tensor ", "differs from the cluster's other replicas"):
        assert word in why, why
    assert "copy the checkpoint again" in why
    assert child.reap(PATIENCE_S)
    assert child.process.returncode == 2


def states(client: Any, name: str) -> list[MemberState]:
    """The current state of a member, or nothing."""
    members = client.cluster.session.view.members
    return [members[name].state] if name in members else []


def layers(client: Any) -> list[torch.Tensor]:
    """One call for each layer, with every expert of the model."""
    return [client.layer(tokens=64, layer=layer) for layer in range(client.shape.num_layers)]


def assert_right(client: Any, expected: list[torch.Tensor]) -> None:
    for found_TH, expected_TH in zip(layers(client), expected, strict=True):
        assert torch.allclose(found_TH, expected_TH, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_row_39_a_damaged_copy_joins_a_cluster_that_serves(
    arch: str,
    checkpoint: Callable[..., Path],
    running: Callable[..., LocalCluster],
    by_hand: Callable[..., ChildProcess],
    join: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Row 39: a server on a damaged copy of the checkpoint joins: refused before SERVING, the file and the
    tensor named; other servers serve.
    """
    model = checkpoint(arch)
    cluster = running(model, servers=2, redundancy=2)
    client = join(cluster, 2)
    expected = layers(client)
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model, layer=1))
    before = client.cluster.placement
    refused(by_hand(cluster, "damaged", copy), str(copy), "layer 1")
    client.until(lambda: MemberState.LEFT in states(client, "damaged"))
    assert_right(client, expected)
    after = client.cluster.placement
    assert after.servers == before.servers
    assert (after.holds_LSE == before.holds_LSE).all()
    # An intact copy is accepted under the same name.
    wait_ready([by_hand(cluster, "damaged", model)], PATIENCE_S)
    client.wait(3)
    assert_right(client, expected)


def test_row_39_one_bit_after_a_server_and_the_balancer_were_lost(
    checkpoint: Callable[..., Path],
    running: Callable[..., LocalCluster],
    by_hand: Callable[..., ChildProcess],
    join: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Row 39: one bit of one expert; a balancer that was restarted learns the digests from live servers."""
    model = checkpoint()
    cluster = running(model, servers=2, redundancy=2)
    client = join(cluster, 2)
    expected = layers(client)
    for name in ("expert-server-1", "balancer"):
        cluster.children[name].signal(signal.SIGKILL)
    cluster.restart("balancer")
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model)[-1:])
    # With two live servers and redundancy 2 it would hold every expert.
    child = by_hand(cluster, "damaged", copy)
    refused(child, expert_keys(model)[-1], f"expert {client.shape.num_experts - 1}")
    assert_right(client, expected)


@pytest.mark.parametrize("place", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_row_39_a_damaged_copy_among_the_servers_of_a_cold_start(
    place: int,
    checkpoint: Callable[..., Path],
    running: Callable[..., LocalCluster],
    by_hand: Callable[..., ChildProcess],
    join: Callable[..., Any],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    """Row 39: at a cold start nothing is known: the copy that the others contradict is refused."""
    model = checkpoint()
    copy = damaged_copy(model, tmp_path / "copy", expert_keys(model))
    expected = layers(join(running(model, servers=1, redundancy=1), 1))
    with ExitStack() as stack:

        def start(name: str, *words: str) -> ChildProcess:
            child = ChildProcess(name, words, None, fork_server=fork_server)
            stack.callback(stop_all, [child], at_once=True)
            return child

        monitor = start("monitor", "monitor")
        wait_ready([monitor], PATIENCE_S)
        parts = Parts(model, str(monitor.address))
        start("balancer", *("balancer", "--join", parts.monitor_address, "--servers", "3"))
        servers = [by_hand(parts, f"s{i}", copy if i == place else model) for i in range(3)]
        damaged = servers.pop(place)
        wait_ready(servers, PATIENCE_S)
        client = join(parts, 2)
        assert_right(client, expected)
        refused(damaged, str(copy))
        assert_right(client, expected)


def test_row_39_weights_by_peers_of_which_one_has_a_damaged_copy(
    checkpoint: Callable[..., Path],
    running: Callable[..., LocalCluster],
    by_hand: Callable[..., ChildProcess],
    join: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Row 39: a server without a checkpoint takes no wrong bytes from a peer: it asks another one, and is
    refused if all peers send the same.
    """
    model = checkpoint()
    first, second = (shutil.copytree(model, tmp_path / name) for name in ("first", "second"))
    cluster = running(first, servers=1, redundancy=1)
    client = join(cluster, 1)
    expected = layers(client)
    wait_ready([by_hand(cluster, "second", second)], PATIENCE_S)
    client.wait(2)
    # The server read its own experts before the damage; it reads again what it sends.
    damage(first, expert_keys(first))
    wait_ready([by_hand(cluster, "guest", None)], PATIENCE_S)
    client.wait(3)
    assert_right(client, expected)
    damage(second, expert_keys(second))
    refused(by_hand(cluster, "late", None))
    assert_right(client, expected)

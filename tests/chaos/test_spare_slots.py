"""Spare replicas under load: they follow the hot experts, and no kill or wrong belief about them shows."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chaos_world import ChaosWorld, Client, same
from eaas.types import Placement, Role
from eaas_cli.demo_model import write_demo_model
from server_tokens import tokens_LE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVERS = tuple(f"expert-server-{i}" for i in range(4))
LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 16, 2, 256, 64
Call = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spares") / "model"
    write_demo_model(
        path, "qwen3_moe", layers=LAYERS, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, seed=1
    )
    return path


def hot_experts(placement: Placement, pair: tuple[int, int]) -> np.ndarray:
    """bool (L, E): the experts that these two servers have, and no others."""
    holds_LSE = placement.holds_LSE
    return holds_LSE[:, pair[0]] & holds_LSE[:, pair[1]]


def busiest_pair(placement: Placement, *but: tuple[int, int]) -> tuple[int, int]:
    """The two servers with most experts in common, of the layer that has fewest."""
    pairs = [(a, b) for a in range(4) for b in range(a) if (a, b) not in but]
    return max(pairs, key=lambda pair: hot_experts(placement, pair).sum(axis=1).min())


def load_of(client: Client, hot_LE: np.ndarray) -> list[tuple[Call, torch.Tensor]]:
    """Layer calls for mostly these experts, with their right answers."""
    dice = torch.Generator().manual_seed(3)
    found = []
    for layer in list(range(LAYERS)) * 4:
        weight_E = torch.from_numpy(np.where(hot_LE[layer], 1.0, 0.01))
        ids_TK = torch.multinomial(weight_E.repeat(TOKENS, 1), TOP_K, generator=dice)
        x_TH = torch.randn(TOKENS, HIDDEN, generator=dice)
        call = layer, x_TH, ids_TK, torch.rand(TOKENS, TOP_K, generator=dice), None
        found.append((call, client.cluster.layer_call(*call)))
    return found


class Calls:
    """Calls in a loop; each answer must be right."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.load: list[tuple[Call, torch.Tensor]] = []
        self.ended = 0
        self.wrong: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()

        def work() -> None:
            while not over.is_set() and not self.wrong:
                for call, expected_TH in self.load:
                    try:
                        out_TH = self._client.cluster.layer_call(*call)
                    except Exception as error:  # noqa: BLE001 (the test asserts on it)
                        self.wrong.append(error)
                        return
                    if not same(out_TH, expected_TH):
                        self.wrong.append(call)
                    self.ended += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert not self.wrong


def tokens_SLE(client: Client) -> np.ndarray:
    """Tokens that each server has computed so far."""
    members = {m.id: m for m in client.cluster.session.view.live(Role.EXPERT_SERVER)}
    return np.stack([tokens_LE(members[name].address) for name in SERVERS])


def test_they_follow_the_load_and_survive_a_kill(chaos: ChaosWorld, model: Path) -> None:
    """First the experts of one pair of servers are hot, then those of another; then a server is killed."""
    balancer = {"spare_slots": True, "step_s": 0.25, "speeds": "stated"}
    cluster = chaos.start(model=model, servers=4, redundancy=2, settings={"balancer": balancer})
    # A busy machine must not look like slow servers.
    client = chaos.join(cluster, 4, hedge_share=0.0, attempt_timeout_s=5.0, layer_timeout_s=30.0)
    placement = client.cluster.placement
    assert placement is not None
    is_extra_SLE = ~placement.holds_LSE.transpose(1, 0, 2)
    calls = Calls(client)
    first = busiest_pair(placement)
    second = busiest_pair(placement, first)
    calls.load = load_of(client, hot_experts(placement, first))

    def helpers(pair: tuple[int, int]) -> list[bool]:
        """Whether each layer's hot experts have a spare replica."""
        hot_LE = hot_experts(placement, pair)
        held = [p for places in client.cluster.view().spares.held.values() for p in places]
        return [any(hot_LE[at, e] for at, e in held if at == layer) for layer in range(LAYERS)]

    with calls.running():
        client.until(lambda: all(helpers(first)))
        before = tokens_SLE(client)
        # How many depends on the servers' speeds, which other processes on the cores change.
        client.until(lambda: ((tokens_SLE(client) - before) * is_extra_SLE).sum() > TOKENS)

        calls.load = load_of(client, hot_experts(placement, second))
        client.until(lambda: all(helpers(second)))

        victim = SERVERS[second[0]]
        cluster.children[victim].signal(signal.SIGKILL)
        client.until(lambda: not client.cluster.view().usable_S().all())
        cluster.restart(victim)
        client.wait(4)
        ended = calls.ended
        client.until(lambda: calls.ended > ended + 2 * len(calls.load) and all(helpers(second)))
    # Spare replicas are no part of any placement, and of no server's share.
    assert client.cluster.placement is placement
    assert not client.cluster.uncovered()

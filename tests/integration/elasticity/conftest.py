"""Clusters that change while a client decodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_client
from decoding import cluster_of, eager, generate, prompts
from eaas.config import AttentionClientConfig, load_config
from eaas.types import Member, MemberState, Role
from eaas_cli.local import LocalCluster
from waiting import eventually

NEW_TOKENS = 12


class Client:
    """A model whose experts are in the cluster; it decodes greedily and checks every token."""

    def __init__(self, path: Path, monitor_address: str, expected: torch.Tensor) -> None:
        self.model = attention_client.load(path, monitor_address, config=AttentionClientConfig())
        self.cluster = cluster_of(self.model)
        self._expected = expected
        self.rounds = 0

    def decode(self) -> None:
        tokens = generate(self.model, prompts(2), NEW_TOKENS)
        assert torch.equal(tokens, self._expected)
        self.rounds += 1

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """A thread decodes during the context; no call may fail, and every token must be right."""
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                self.decode()

        with ThreadPoolExecutor(1) as pool:
            decoding = self._decoding = pool.submit(work)
            try:
                self.more_rounds(1)
                yield
                self.more_rounds(2)
            finally:
                over.set()
            decoding.result()

    def more_rounds(self, count: int) -> None:
        wanted = self.rounds + count
        eventually(lambda: self._decoding.done() or self.rounds >= wanted)
        if self._decoding.done():
            self._decoding.result()

    def servers(self) -> dict[str, Member]:
        """Live expert servers, by id."""
        return {m.id: m for m in self.cluster.session.view.live(Role.EXPERT_SERVER)}

    def settled(self, *names: str, replicas: int = 2) -> bool:
        """Whether exactly these servers hold the experts, so many times, and this client reaches all."""
        placement, members = self.cluster.placement, self.servers()
        if placement is None or set(placement.servers) != set(names) or set(members) != set(names):
            return False
        held_S = placement.holds_LSE.sum(axis=(0, 2))
        return bool(
            all(m.state is MemberState.SERVING for m in members.values())
            and (placement.holds_LSE.sum(axis=1) == replicas).all()
            and self.cluster.view().usable_S().all()
            and all(
                members[s].experts == held
                for s, held in zip(placement.servers, held_S, strict=True)
            )
        )

    def wait_settled(self, *names: str, replicas: int = 2) -> None:
        eventually(lambda: self.settled(*names, replicas=replicas))


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[..., Path]) -> torch.Tensor:
    return generate(eager(checkpoint("qwen3_moe")), prompts(2), NEW_TOKENS)


@pytest.fixture
def elastic(
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    expected: torch.Tensor,
    tmp_path: Path,
) -> Callable[..., tuple[LocalCluster, Client]]:
    """Start a cluster, and a client in this process."""

    def start(
        dead_grace_s: float = 60.0, node: str = "", **options: Any
    ) -> tuple[LocalCluster, Client]:
        path = checkpoint("qwen3_moe")
        config = tmp_path / "cluster.yaml"
        config.write_text(
            f"balancer: {{dead_grace_s: {dead_grace_s}}}\nexpert_server: {{node: {json.dumps(node)}}}"
        )
        cluster = start_cluster(
            path, clients=0, config_file=config, config=load_config(config), **options
        )
        client = Client(path, cluster.monitor_address, expected)
        client.wait_settled(
            *sorted(c.name for c in cluster.running_servers()), replicas=cluster.redundancy
        )
        return cluster, client

    return start


@pytest.fixture
def kill() -> Callable[[LocalCluster, str], None]:
    def strike(cluster: LocalCluster, name: str) -> None:
        os.kill(cluster.children[name].pid, signal.SIGKILL)

    return strike

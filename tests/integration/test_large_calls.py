"""A layer call of any size is one request to each server, whose slots have memory for the client's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chaos_world import Client, same
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SERVERS, MOST = 2, 4096
SIZES = (1, 63, 64, 65, 511, 1024, 2049, MOST)


@pytest.fixture(scope="module")
def cluster(checkpoint: Callable[..., Path], fork_server: ForkServer) -> Iterator[LocalCluster]:
    with LocalCluster(
        checkpoint(), servers=SERVERS, redundancy=2, clients=0, fork_server=fork_server
    ) as cluster:
        yield cluster


def call(client: Client, tokens: int, piece: int) -> torch.Tensor:
    """The result of a call of so many tokens, in pieces."""
    x_TH, ids_TK, scores_TK = client.draw(tokens, seed=tokens)
    parts = [slice(t, t + piece) for t in range(0, tokens, piece)]
    made = [client.cluster.layer_call(0, x_TH[p], ids_TK[p], scores_TK[p], None) for p in parts]
    return torch.cat(made)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("step", [MOST, 100])
def test_calls_of_all_sizes(cluster: LocalCluster, transport: str, step: int) -> None:
    client = Client(cluster, transport=transport, max_batch_tokens=step, hedge_share=0.0)
    try:
        client.wait(SERVERS)
        for tokens in SIZES:
            expected_TH = call(client, tokens, 50)
            before = client.requests()
            assert same(call(client, tokens, tokens), expected_TH)
            if tokens <= step:
                assert client.requests() - before <= SERVERS
            else:
                assert client.requests() - before > SERVERS
    finally:
        client.cluster.close()

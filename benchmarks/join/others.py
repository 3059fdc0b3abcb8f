"""Layer calls of another client at a steady rate, to measure how a joining server slows them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig

__all__ = ["Others", "joined_client", "percentile"]

_COVERED_S = 60.0


class Others:
    """Makes one client's layer calls at a steady rate and records their durations.

    Args:
        cluster: Cluster to call.
        tokens: Tokens per call.
        calls_per_s: Rate. A call's duration counts from its scheduled time, so that it includes the wait for
            the call before.
    """

    def __init__(self, cluster: Cluster, tokens: int, calls_per_s: float) -> None:
        self._cluster = cluster
        self._tokens = tokens
        self._period_s = 1 / calls_per_s
        self._over = threading.Event()
        # Scheduled time (monotonic seconds) and duration of each call.
        self.calls: list[tuple[float, float]] = []

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Make layer calls in a thread during the block. Raises the error of a call."""
        with ThreadPoolExecutor(1, "others") as pool:
            calling = pool.submit(self._run)
            try:
                yield
            finally:
                self._over.set()
            calling.result()

    def seconds(self, begin: float, end: float) -> list[float]:
        """Durations, in seconds, of the calls scheduled between two times."""
        return [took for due, took in tuple(self.calls) if begin <= due < end]

    def _run(self) -> None:
        shape = self._cluster.shape
        generator = torch.Generator().manual_seed(0)
        x_TH = torch.randn(self._tokens, shape.hidden_size, generator=generator)
        scores_TK = torch.full((self._tokens, shape.top_k), 1 / shape.top_k)
        due, number = time.monotonic(), 0
        while not self._over.is_set():
            order_TE = torch.rand(self._tokens, shape.num_experts, generator=generator)
            ids_TK = order_TE.topk(shape.top_k).indices
            layer = number % shape.num_layers
            self._cluster.layer_call(layer, x_TH.bfloat16(), ids_TK, scores_TK, None)
            self.calls.append((due, time.monotonic() - due))
            due, number = due + self._period_s, number + 1
            self._over.wait(max(0.0, due - time.monotonic()))


@contextmanager
def joined_client(model: Path, monitor_address: str) -> Iterator[Cluster]:
    """Yield an attention client without a model, joined to the cluster, once every expert is covered."""
    cluster = Cluster(
        monitor_address,
        Checkpoint.open(model).shape,
        AttentionClientConfig(),
        ClientMetrics(CollectorRegistry()),
    )
    try:
        cluster.wait_until_covered(_COVERED_S)
        cluster.serving()
        yield cluster
    finally:
        cluster.close()


def percentile(values: list[float], share: float) -> float:
    """Compute a percentile of the values; nan if there are none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

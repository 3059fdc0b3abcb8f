"""`python -m lone_client MONITOR MODEL TRANSPORT HOW`: an attention client that a test can kill or stop.

HOW "at-once": one call to each of three layers at the same time; prints "asked" once all are in slots.
HOW "on-and-on": one call after another, each compared with the first. It prints "ready" once connected, then
a line for each answer.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig

ID = "lone-client"


def main(monitor: str, model: str, transport: str, how: str) -> None:
    shape = Checkpoint.open(Path(model)).shape
    # No hedges and no retries, so that the server has exactly these requests.
    patient = {"attempt_timeout_s": 60.0, "hedge_share": 0.0} if how == "at-once" else {}
    config = AttentionClientConfig(transport=transport, layer_timeout_s=60.0, **patient)
    cluster = Cluster(monitor, shape, config, ClientMetrics(CollectorRegistry()), client_id=ID)
    cluster.wait_until_covered(60.0)
    cluster.serving()
    print("ready", flush=True)
    dice = torch.Generator().manual_seed(7)
    x_TH = torch.randn(8, shape.hidden_size, generator=dice)
    ids_TK = torch.rand(8, shape.num_experts, generator=dice).argsort(dim=1)[:, : shape.top_k]
    scores_TK = torch.rand(8, shape.top_k, generator=dice)

    def call(layer: int) -> torch.Tensor:
        out_TH = cluster.layer_call(layer, x_TH, ids_TK, scores_TK, None)
        print("answer", flush=True)
        return out_TH

    if how == "at-once":
        threads = [threading.Thread(target=call, args=(layer,)) for layer in range(3)]
        for thread in threads:
            thread.start()
        while sum(c.in_flight for c in cluster.view().connections if c) < len(threads):
            time.sleep(0.01)
        print("asked", flush=True)
        for thread in threads:
            thread.join()
        return
    first_TH = call(0)
    while True:
        assert torch.allclose(call(0), first_TH, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])

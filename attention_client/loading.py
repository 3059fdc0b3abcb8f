"""`attention_client.load`: from a checkpoint and a running cluster to a transformers model."""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from pathlib import Path

import httpx
import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedModel

from attention_client.cluster import Cluster
from attention_client.metrics import ClientMetrics
from attention_client.model import load_model
from attention_client.overlap import DoubleBatch
from eaas.api_keys import authorization
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig
from eaas.errors import ClusterError
from eaas.tls import Identity
from eaas.types import Role

__all__ = ["load", "load_onto"]

_READY_S = 60.0


def load(
    path: str | Path,
    cluster: Cluster | str,
    *,
    config: AttentionClientConfig | None = None,
    dtype: torch.dtype | None = None,
    tls: str | Path | None = None,
) -> PreTrainedModel:
    """Load a checkpoint's attention part; its experts are computed by a cluster.

    The model is transformers' own: `generate`, `forward` and continuous batching work as ever. It joins the
    cluster as one more attention client and leaves it when it is garbage-collected.

    Args:
        path: Directory of the Hugging Face checkpoint that the cluster serves.
        cluster: The monitor's host:port, the URL of an endpoint of the cluster, or a `Cluster`.
        config: Transport, slots, timeouts; where `cluster` is not a `Cluster`.
        dtype: Of the weights; by default the checkpoint's.
        tls: Directory of certificates (`eaas certs`); where `cluster` is not a `Cluster`. The key that an
            endpoint asks for is taken from EAAS_API_KEY.

    Raises:
        CheckpointError: The path holds nothing that can be served (see its subclasses).
        ClusterError: The cluster cannot be reached, or is not SERVING within a minute.
        ConfigError: The certificates, or the key, cannot be used.
    """
    checkpoint = Checkpoint.open(path)
    if isinstance(cluster, Cluster):
        if cluster.shape.digest != checkpoint.shape.digest:
            raise ClusterError(
                f"{checkpoint.path} is not the checkpoint that this Cluster was made for"
            )
        return load_onto(checkpoint, cluster, dtype=dtype)
    # Former models of this process are in cycles: until they are collected, they hold slots.
    gc.collect()
    address = _monitor_of(cluster) if cluster.startswith(("http://", "https://")) else cluster
    joined = Cluster(
        address,
        checkpoint.shape,
        config or AttentionClientConfig(),
        ClientMetrics(CollectorRegistry()),
        tls=None if tls is None else Identity(Path(tls), Role.ATTENTION_CLIENT.value),
    )
    try:
        joined.wait_until_covered(_READY_S)
        model = load_onto(checkpoint, joined, dtype=dtype)
    except BaseException:
        joined.close()
        raise
    joined.serving()
    atexit.register(joined.close)
    weakref.finalize(model, _leave, joined).atexit = False
    return model


def load_onto(
    checkpoint: Checkpoint, cluster: Cluster, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of an opened checkpoint: experts in a cluster, overlap as the cluster's settings say.

    Raises:
        CheckpointError: The path holds nothing that can be served (see its subclasses).
    """
    model = load_model(checkpoint, cluster, dtype=dtype)
    DoubleBatch(model, cluster.config.overlap, cluster.metrics.forwards)
    return model


def _leave(cluster: Cluster) -> None:
    """Close a cluster whose model is gone.

    In a thread of its own: the garbage collector may call this anywhere, under any lock.
    """
    atexit.unregister(cluster.close)
    threading.Thread(target=cluster.close, name="leave", daemon=True).start()


def _monitor_of(endpoint: str) -> str:
    """Ask an HTTP endpoint for the address of its cluster's monitor."""
    url = f"{endpoint.rstrip('/').removesuffix('/v1')}/eaas/v1/status"
    try:
        members = (
            httpx.get(url, headers=authorization(), timeout=5.0)
            .raise_for_status()
            .json()["members"]
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ClusterError(f"{endpoint}: no cluster answers there ({error})") from None
    for member in members:
        if member["role"] == "monitor":
            return str(member["address"])
    raise ClusterError(f"{endpoint}: the cluster has no monitor")

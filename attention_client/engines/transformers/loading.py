"""`attention_client.load`: make a model, here or in a user's process, from a checkpoint and a cluster."""

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
from attention_client.engines.transformers.dense.weights import use_own_products
from attention_client.engines.transformers.first_pass import check_first_pass
from attention_client.engines.transformers.model import load_model
from attention_client.engines.transformers.overlap.decoder import DoubleBatch
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.net.api_keys import authorization
from eaas.net.http_client import failure, http_settings
from eaas.net.tls import Identity
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
    """Load a checkpoint without its routed experts, in the caller's process; a cluster computes them.

    The model is transformers' own: `generate`, `forward` and continuous batching work as usual. It raises
    GradientError if a gradient would have to pass the experts. It joins the cluster as another attention
    client and leaves when it is garbage-collected. Threads may load at the same time.

    Args:
        path: Directory of the Hugging Face checkpoint that the cluster serves, or its ORG/NAME in the cache
            of huggingface_hub.
        cluster: The monitor's host:port, the URL of an endpoint of the cluster, or a `Cluster`.
        config: Transport, slots, timeouts; unused if `cluster` is a `Cluster`.
        dtype: Weight dtype; defaults to the checkpoint's.
        tls: Directory of certificates (`eaas certs`); unused if `cluster` is a `Cluster`. An endpoint's API
            key comes from EAAS_API_KEY.

    Raises:
        CheckpointError: The checkpoint cannot be served (see its subclasses).
        ClusterError: The cluster cannot be reached, or is not SERVING within a minute.
        ConfigError: The certificates or the key cannot be used.
    """
    checkpoint = Checkpoint.open(path)
    if isinstance(cluster, Cluster):
        if cluster.shape.digest != checkpoint.shape.digest:
            raise ClusterError(f"{checkpoint.path} is not the checkpoint of this Cluster")
        return load_onto(checkpoint, cluster, dtype=dtype)
    # Collect former models, because they are in reference cycles and hold slots until collected.
    gc.collect()
    is_endpoint = cluster.startswith(("http://", "https://"))
    identity = None if tls is None else Identity(Path(tls), Role.ATTENTION_CLIENT.value)
    try:
        joined = Cluster(
            _monitor_of(cluster) if is_endpoint else cluster,
            checkpoint.shape,
            config or AttentionClientConfig(),
            ClientMetrics(CollectorRegistry()),
            tls=identity,
        )
    except ClusterError as error:
        hint = "" if is_endpoint else f", or give http://{cluster} if it is an endpoint"
        raise ClusterError(f"{error}{hint}") from error
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
    """Make a model without routed experts, which the joined cluster computes.

    Overlaps micro-batches as the cluster's config says.

    Raises:
        CheckpointError: The checkpoint cannot be served (see its subclasses), or its first pass fails.
    """
    model = load_model(checkpoint, cluster, dtype=dtype)
    check_first_pass(model, checkpoint)
    use_own_products(model, cluster.config.threads or usable_cores())
    DoubleBatch(model, cluster.config.overlap, cluster.metrics.forwards)
    return model


def _leave(cluster: Cluster) -> None:
    """Leave the cluster after its model was garbage-collected.

    The garbage collector may call this under any lock, so a new thread closes the cluster.
    """
    atexit.unregister(cluster.close)
    threading.Thread(target=cluster.close, name="leave", daemon=True).start()


def _monitor_of(endpoint: str) -> str:
    """Ask an HTTP endpoint for the address of its cluster's monitor, which `load` then joins through."""
    url = f"{endpoint.rstrip('/').removesuffix('/v1')}/eaas/v1/status"
    try:
        with httpx.Client(**http_settings(url), headers=authorization(), timeout=5.0) as http:
            response = http.get(url).raise_for_status()
        members = response.json()["members"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ClusterError(
            f"{endpoint}: no cluster answers there ({failure(url, error)})"
        ) from None
    for member in members:
        if member["role"] == "monitor":
            return str(member["address"])
    raise ClusterError(f"{endpoint}: the cluster has no monitor")

"""The attention client: a transformers model whose experts are elsewhere, and its HTTP endpoint."""

from attention_client.cluster import Cluster
from attention_client.loading import load

__all__ = ["Cluster", "load"]

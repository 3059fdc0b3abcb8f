"""`eaas bench client`: NVIDIA's aiperf, a client that we did not write, drives the chat endpoint."""

from eaas.bench.client.run import bench_client

__all__ = ["bench_client"]

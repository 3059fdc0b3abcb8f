"""NVIDIA's aiperf, an independent client, drives the chat endpoint."""

from benchmarks.client.run import bench_client

__all__ = ["bench_client"]

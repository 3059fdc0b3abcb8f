"""Prometheus metrics of the attention client's HTTP endpoint and scheduler."""

"""Sockets of the attention client's HTTP endpoint: accepts, limits and closes HTTP connections."""

"""The endpoint's sockets: accepts, limits and closes HTTP connections."""

"""Expert-as-a-Service: the core of all services: wire format, RPC, membership, checkpoints, settings."""

__version__ = "0.1.0"

__all__ = ["__version__"]

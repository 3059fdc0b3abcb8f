"""Core of Expert-as-a-Service for all services: wire format, RPC, membership, checkpoints, settings."""

__version__ = "0.1.0"

__all__ = ["__version__"]

"""Expert-as-a-Service: what the four services share (contract, wire, types, errors, config)."""

__version__ = "0.1.0"

__all__ = ["__version__"]

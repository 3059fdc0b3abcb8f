"""Knobs of ScalpeLB, learned by gradient from recorded traces (with torch; a balancer reads them without)."""

from eaas.knobs.train import Options, train

__all__ = ["Options", "train"]

"""Knobs of ScalpeLB, learned by gradient from recorded traces. Needs torch; the balancer reads the file without."""

from eaas.knobs.train import Options, train

__all__ = ["Options", "train"]

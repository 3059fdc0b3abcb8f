"""ScalpeLB's knobs, learned by gradient from recorded traces (needs torch)."""

from simulator.learned_knobs.train import Options, train

__all__ = ["Options", "train"]

"""Benchmark of ScalpeLB's knobs: learned by gradient from routing traces, against its defaults."""

"""A cluster that is attacked on purpose, under load, with answers that are known beforehand.

schedule (pure: from a seed) -> faults (signals, networks, processes) -> history -> check (pure)
"""

from eaas.chaos.run import run_chaos

__all__ = ["run_chaos"]

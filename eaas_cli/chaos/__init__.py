"""Fault injection (`eaas chaos run`): a cluster under load with known answers, and faults drawn from a seed.

schedule (pure: from a seed) -> faults (signals, networks, processes) -> history -> check (pure)
"""

from eaas_cli.chaos.run import run_chaos

__all__ = ["run_chaos"]

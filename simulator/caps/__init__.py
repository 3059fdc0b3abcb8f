"""Simulates an attention client's batch selection (CAPS): which waiting requests should run together.

Letters: N requests, W of them in the window, B in a batch, E logical experts, S expert servers.
"""

from simulator.caps.engine import Rules, Run, simulate
from simulator.caps.workload import Workload

__all__ = ["Rules", "Run", "Workload", "simulate"]

"""The simulator: what a placement policy would have done to a recorded load.

    timeline   when is planned and when a layer's plan takes effect (no arrays, no clock)
    planners   the policies of `balancer.policies`, asked as a cluster would ask them
    replay     a policy over a trace: PAR of each iteration and layer, transit, planning time
    score      modelled time, and the score of the dynamic-balancing competition
    compare    many replays: rows for a table, JSON or a plot

It knows traces (`eaas.trace`) and the balancer's pure policies, and nothing that serves.
"""

from simulator.compare import Comparison, compare
from simulator.replay import Replay, replay

__all__ = ["Comparison", "Replay", "compare", "replay"]

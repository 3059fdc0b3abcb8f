"""The simulator: runs the live system's pure parts on traces, in simulated time.

It runs in the process of `eaas trace`, of `eaas simulate` or of a benchmark.

placement    a policy over a routing trace: PAR, transit, planning time, the competition's score
autoscaling  the autoscaler over a traffic trace, compared with groups of fixed sizes
caps         batch selection (CAPS): arrivals and batches as discrete events
routing      routing arithmetic
traces       routing traces
"""

from simulator.placement.compare import Comparison, compare
from simulator.placement.replay import Replay, replay

__all__ = ["Comparison", "Replay", "compare", "replay"]

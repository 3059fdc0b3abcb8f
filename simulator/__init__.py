"""The simulator: what runs live, on a trace and in no time.

    autoscaling, savings        the autoscaler over a traffic trace; groups of fixed sizes beside it
    compare, replay, planners,  a placement policy over a recorded load: PAR of each iteration and layer,
      timeline, score           transit, planning time, modelled time, the competition's score
    caps/                       batch selection (CAPS): arrivals and batches in discrete events

It knows traces, and of the services what is pure.
"""

from simulator.compare import Comparison, compare
from simulator.replay import Replay, replay

__all__ = ["Comparison", "Replay", "compare", "replay"]

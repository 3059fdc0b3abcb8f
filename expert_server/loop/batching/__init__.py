"""Decides in the expert server's loop which requests are computed together, and when (EaaS, section 3.3).

ADR 0008 explains the choice. No clock, no I/O.
"""

from expert_server.loop.batching.batcher import Batcher, Compute, Wait
from expert_server.loop.batching.policies import create_batcher

__all__ = ["Batcher", "Compute", "Wait", "create_batcher"]

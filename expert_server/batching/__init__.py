"""When which requests are computed together (EaaS section 3.3; ADR 0008). No clock, no I/O."""

from expert_server.batching.batcher import Batcher, Compute, Wait
from expert_server.batching.policies import create_batcher

__all__ = ["Batcher", "Compute", "Wait", "create_batcher"]

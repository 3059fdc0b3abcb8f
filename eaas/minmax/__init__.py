"""Min-max split of load over replicas, for balancer and clients."""

from eaas.minmax.split import levels_of, split_of

__all__ = ["levels_of", "split_of"]

"""Min-max split of tokens over replicas, for the balancer (shares) and clients (dispatch)."""

from eaas.minmax.split import levels_of, split_of

__all__ = ["levels_of", "split_of"]

"""Min-max split of tokens over replicas, for the balancer (shares) and clients (dispatch)."""

from eaas.minmax.split import levels, split

__all__ = ["levels", "split"]

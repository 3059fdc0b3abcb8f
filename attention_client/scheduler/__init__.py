"""Choose which waiting requests run together (CAPS), in the attention client and in simulations."""

from attention_client.scheduler.queue import RequestQueue
from attention_client.scheduler.strategies import SelectionStrategy, strategy, strategy_names

__all__ = ["RequestQueue", "SelectionStrategy", "strategy", "strategy_names"]

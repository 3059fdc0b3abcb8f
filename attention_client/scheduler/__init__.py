"""Which waiting requests run together: strategies that choose, and the queue that both drivers share."""

from attention_client.scheduler.queue import RequestQueue
from attention_client.scheduler.strategies import SelectionStrategy, strategy, strategy_names

__all__ = ["RequestQueue", "SelectionStrategy", "strategy", "strategy_names"]

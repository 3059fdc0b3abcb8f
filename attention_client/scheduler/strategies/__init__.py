"""Selection strategies, live and simulated: each chooses which waiting requests form the next batch."""

from attention_client.scheduler.strategies.base import Context, SelectionStrategy
from attention_client.scheduler.strategies.registry import strategy, strategy_names

__all__ = ["Context", "SelectionStrategy", "strategy", "strategy_names"]

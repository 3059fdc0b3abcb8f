"""Double-batch overlap: one micro-batch computes attention while the other waits for its experts."""

from attention_client.overlap.decoder import DoubleBatch
from attention_client.overlap.turns import micro_batch_tokens, pause

__all__ = ["DoubleBatch", "micro_batch_tokens", "pause"]

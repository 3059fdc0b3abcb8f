"""Sizes of the attention client's engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineSizes"]


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine.

    Attributes:
        num_blocks: Blocks of the paged key-value cache. num_blocks * page_size is the number of tokens
            of all running requests together; a request that does not fit waits. None: as many as fit into
            memory.
        page_size: Tokens per block, at least 4.
        max_batch_tokens: Tokens of one forward pass; longer prompts are prefilled in parts.
        token_target_s: Wanted time between two tokens of an answer while prompts wait; 0: the time of a pass
            of max_batch_tokens.
        attention_threads: Threads that share the attention to the cache and the products without torch.
    """

    num_blocks: int | None = None
    page_size: int = 64
    max_batch_tokens: int = 2048
    token_target_s: float = 0.0
    attention_threads: int = 1

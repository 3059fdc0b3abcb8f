"""What one attention client accepts, and how much memory it spends on it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServeLimits"]


@dataclass(frozen=True)
class ServeLimits:
    """Sizes of the serving engine.

    Attributes:
        num_blocks: Blocks of the paged key-value cache. With page_size this is the number of tokens
            that all running requests hold together; who does not fit waits.
        page_size: Tokens per block (4 at least).
        max_batch_tokens: Tokens of one forward pass; longer prompts are prefilled in parts.
        max_model_len: Most tokens of one request, prompt and answer. None: what the model's
            positions and the cache allow.
        max_requests: Requests that are read, wait or run; the next one is refused with status 429.
        max_body_bytes: Largest request body; a larger one is refused with status 413.
        max_bodies_bytes: Bodies of all requests together, less the first 64 KiB of each; a request that needs
            more is refused with 429. Where those that are not complete need more than half, the oldest of
            them is refused with status 408.
        body_timeout_s: A client that has not sent its body by then is refused with status 408.
        send_timeout_s: A client that takes nothing of its answer for so long (at most twice that) is cut off.
        max_connections: Open connections; fewer where the limit of open files is low. One more takes the
            place of an idle one, or of the oldest whose request is not complete, or is refused with 429.
        head_timeout_s: A connection on which no request began, its headers whole, for so long is closed.
        max_head_bytes: Request line and headers; more is refused with status 400.
    """

    num_blocks: int = 256
    page_size: int = 32
    max_batch_tokens: int = 256
    max_model_len: int | None = None
    max_requests: int = 1024
    max_body_bytes: int = 4 * 2**20
    max_bodies_bytes: int = 128 * 2**20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    max_connections: int = 4096
    head_timeout_s: float = 10.0
    max_head_bytes: int = 16 * 2**10

"""Double-batch overlap: one micro-batch computes attention while the other waits for its experts."""

from typing import TYPE_CHECKING, Any

from attention_client.overlap.turns import micro_batch_tokens, pause

if TYPE_CHECKING:
    from attention_client.overlap.decoder import DoubleBatch

__all__ = ["DoubleBatch", "micro_batch_tokens", "pause"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; a layer call alone wants to know of the turns only.
    if name == "DoubleBatch":
        from attention_client.overlap.decoder import DoubleBatch

        return DoubleBatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

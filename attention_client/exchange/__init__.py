"""Slots, requests and answers of layer calls, compiled."""

from attention_client.exchange._exchange import (
    AWAITED,
    CAME,
    REVOKED,
    WRONG,
    Exchange,
    Route,
    Slots,
    reads_tensors,
)

__all__ = ["AWAITED", "CAME", "REVOKED", "WRONG", "Exchange", "Route", "Slots", "reads_tensors"]

"""The compiled common case of a layer call: slots, requests and answers without a fault."""

from attention_client.exchange._exchange import Exchange, Lane, Route, reads_tensors

__all__ = ["Exchange", "Lane", "Route", "reads_tensors"]

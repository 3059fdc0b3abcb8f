"""Dispatch and combine: which server computes what of a layer call, and the sum of what they answer."""

from attention_client.dispatch.policies import DispatchPolicy, Load, dispatch_policy

__all__ = ["DispatchPolicy", "Load", "dispatch_policy"]

"""Dispatch and combine: assign a layer call's (token, expert) pairs to servers, and sum their answers."""

from attention_client.dispatch.policy import DispatchPolicy, Load, dispatch_policy

__all__ = ["DispatchPolicy", "Load", "dispatch_policy"]

"""Dispatch and combine: assign a layer call's (token, expert) pairs to servers, and sum their answers."""

from attention_client.dispatch.policy import DispatchPolicy, Load, dispatch_policy
from attention_client.dispatch.replicas import ReplicaShares

__all__ = ["DispatchPolicy", "Load", "ReplicaShares", "dispatch_policy"]

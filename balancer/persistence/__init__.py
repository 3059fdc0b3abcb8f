"""Balancer state that survives a restart or a change of leader."""

"""Simulated queues compared with live ones."""

"""Attention over a paged key-value cache, for continuous batching on CPUs."""

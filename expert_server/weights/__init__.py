"""Weights of single experts: read from a checkpoint or from other servers."""

"""Kernel `triton`: experts in a GPU's memory. Imported where this kernel is asked for only."""

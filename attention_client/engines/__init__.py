"""Engines that run attention and call the expert servers for each MoE layer."""

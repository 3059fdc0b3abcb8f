"""Simulation of clients that share expert servers: layer-call times by what clients know of the queues."""

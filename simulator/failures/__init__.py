"""Simulates lost servers, nodes and racks, and rolling upgrades, of large clusters with the live planner."""

from simulator.failures.cluster import Cluster, Sizes
from simulator.failures.timeline import Point, Timeline

__all__ = ["Cluster", "Point", "Sizes", "Timeline"]

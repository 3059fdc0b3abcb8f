"""Simulation: traces and synthetic work through the very policies and strategies that run live."""

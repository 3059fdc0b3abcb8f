"""Clients of the balancer's API and of its placement stream."""

"""Placement policies on a routing trace."""

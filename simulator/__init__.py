"""Discrete events: what runs live, on a trace and in no time."""

"""Simulates the live autoscaler on traffic traces."""

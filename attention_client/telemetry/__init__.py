"""Metrics, spans and request outcomes of an attention client."""

"""Spans of requests (OpenTelemetry), behind a switch."""

from eaas.telemetry.tracing import Tracing, start_tracing

__all__ = ["Tracing", "start_tracing"]

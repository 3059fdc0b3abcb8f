"""Request traces (OpenTelemetry), off by default."""

from eaas.telemetry.tracing import Tracing, start_tracing

__all__ = ["Tracing", "start_tracing"]

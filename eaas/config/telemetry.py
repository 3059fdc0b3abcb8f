"""Telemetry section of `cluster.yaml`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TelemetryConfig"]


class TelemetryConfig(BaseModel):
    """Request traces of attention clients and expert servers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traces: bool = Field(
        False, description="Send traces of sampled requests to a collector (docs/metrics.md)."
    )
    sampling: float = Field(0.01, ge=0, le=1, description="Share of requests that are traced.")
    endpoint: str = Field(
        "http://127.0.0.1:4317",
        pattern=r"^https?://[^/\s]+$",
        description="OTLP collector (gRPC); http means plain text, https means TLS.",
    )

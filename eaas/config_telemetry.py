"""Settings of telemetry, a section of `cluster.yaml`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TelemetryConfig"]


class TelemetryConfig(BaseModel):
    """Traces of requests, for attention clients and expert servers alike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traces: bool = Field(
        False, description="Send spans of some requests to a collector (docs/metrics.md)."
    )
    sampling: float = Field(0.01, ge=0, le=1, description="Share of the requests that are traced.")
    endpoint: str = Field(
        "http://127.0.0.1:4317",
        pattern=r"^https?://[^/\s]+$",
        description="OTLP collector (gRPC); http: plain text, https: TLS.",
    )

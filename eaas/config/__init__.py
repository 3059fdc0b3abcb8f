"""Settings: one frozen object per role, read from `cluster.yaml`; `EAAS_...` variables override them."""

from eaas.config.loading import load_config
from eaas.config.settings import (
    HOLD_BACK_S,
    AttentionClientConfig,
    AutoscalerConfig,
    BalancerConfig,
    ClusterConfig,
    ExpertServerConfig,
    MonitorConfig,
    RayConfig,
    SchedulerConfig,
    SecurityConfig,
    TelemetryConfig,
)

__all__ = [
    "HOLD_BACK_S",
    "AttentionClientConfig",
    "AutoscalerConfig",
    "BalancerConfig",
    "ClusterConfig",
    "ExpertServerConfig",
    "MonitorConfig",
    "RayConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "TelemetryConfig",
    "load_config",
]

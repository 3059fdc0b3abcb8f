"""Settings: one frozen object per role, read from `cluster.yaml`; `EAAS_...` variables override them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaas.config.loading import load_config
    from eaas.config.settings import (
        HOLD_BACK_S,
        AttentionClientConfig,
        AutoscalerConfig,
        BalancerConfig,
        ClusterConfig,
        ExpertServerConfig,
        FrontendConfig,
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
    "FrontendConfig",
    "MonitorConfig",
    "RayConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "TelemetryConfig",
    "load_config",
]


def __getattr__(name: str) -> Any:
    # On first use: most commands need no settings, and so no pydantic.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "loading" if name == "load_config" else "settings"
    return getattr(import_module(f"{__name__}.{module}"), name)

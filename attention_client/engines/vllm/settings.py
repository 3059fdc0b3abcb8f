"""Section `eaas` of vLLM's `--additional-config`: which cluster to join, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eaas.config import AttentionClientConfig
from eaas.errors import ConfigError

__all__ = ["NOT_QUANTIZED", "SECTION", "EngineSettings", "read_settings"]

SECTION = "eaas"
"""Key of the section."""
NOT_QUANTIZED = '{"quantization_config": null}'
"""vLLM's `--hf-overrides` for a quantised checkpoint: the loader dequantises its weights."""


class EngineSettings(BaseModel):
    """Settings of the engine `vllm`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    monitor: str = Field(min_length=1, description="Address of the monitor, host:port.")
    id: str = Field("", description="Id of the member; empty: from host and process id.")
    endpoint: str = Field(
        "", description="Address of vLLM's HTTP server, host:port, for `eaas status`."
    )
    cover_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        600.0, description="Longest wait at the start until every expert has a live replica."
    )
    tls_dir: str = Field("", description="Directory of certificates; empty: plain text.")
    client: AttentionClientConfig = Field(
        AttentionClientConfig(), description="Transport, slots and timeouts of the client."
    )


def read_settings(additional_config: Any) -> EngineSettings:
    """Read the section from vLLM's additional config.

    Raises:
        ConfigError: The section is missing or wrong.
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if section is None:
        raise ConfigError(
            "--load-format eaas needs the cluster to join: add --additional-config "
            '\'{"eaas": {"monitor": "HOST:PORT"}}\', or start vLLM with `eaas vllm`'
        )
    try:
        return EngineSettings.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join((SECTION, *map(str, first["loc"])))
        raise ConfigError(f"--additional-config: {place}: {first['msg']}") from None

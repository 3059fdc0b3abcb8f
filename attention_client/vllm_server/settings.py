"""Settings of the middleware in vLLM's API server, which `eaas vllm` passes in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Self

from eaas.errors import ConfigError

__all__ = ["EndpointSettings"]

_VARIABLE = "_EAAS_VLLM_ENDPOINT"


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of the HTTP endpoint. They hold the files of keys and certificates, but no secret.

    Attributes:
        monitor: Address of the monitor, host:port.
        host: Address that vLLM listens on.
        port: Its port.
        api_key_file: File of API keys; empty: the key in the environment, or no key.
        allowed_hosts: Further names that requests to a loopback endpoint may use.
        tls_dir: Directory of certificates; empty: plain text.
    """

    monitor: str
    host: str
    port: int
    api_key_file: str = ""
    allowed_hosts: tuple[str, ...] = ()
    tls_dir: str = ""

    def environment(self) -> dict[str, str]:
        """Environment variables that pass these settings."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> Self:
        """Read the settings in vLLM's process. Raises ConfigError without them."""
        text = os.environ.get(_VARIABLE)
        if text is None:
            raise ConfigError("this middleware has no settings: start vLLM with `eaas vllm`")
        found = json.loads(text)
        return cls(**{**found, "allowed_hosts": tuple(found["allowed_hosts"])})

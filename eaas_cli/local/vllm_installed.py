"""In the launcher: the check that vLLM can be the engine, before any process starts."""

from __future__ import annotations

from importlib.metadata import entry_points

from attention_client.engines.vllm.contract import LOAD_FORMAT, refuse_unsupported
from eaas.errors import ConfigError

__all__ = ["refuse_missing_vllm"]

_INSTALL = (
    "`make setup-vllm` makes an environment with both, or: "
    "pip install 'expert-as-a-service[server,vllm]' beside vLLM"
)


def refuse_missing_vllm() -> None:
    """Raise ConfigError unless this environment has a supported vLLM that finds this package's plugin."""
    try:
        refuse_unsupported()
    except ConfigError as error:
        raise ConfigError(f"--engine vllm: {error}; {_INSTALL}") from error
    if not any(p.name == LOAD_FORMAT for p in entry_points(group="vllm.general_plugins")):
        raise ConfigError(f"--engine vllm: vLLM does not find this package's plugin; {_INSTALL}")

"""Reading of a cluster's settings, with one clear error for what is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict, SettingsError

from eaas.config.explanations import BETWEEN, PREFIX, explain, variable
from eaas.config.settings import ClusterConfig
from eaas.errors import ConfigError

__all__ = ["load_config"]

_SERVICE = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)


def load_config(path: Path | None = None, **overrides: dict[str, Any]) -> ClusterConfig:
    """Read a cluster's settings for a command, from `cluster.yaml`, environment and command line.

    Args:
        path: `cluster.yaml`; None uses defaults and the environment only.
        overrides: Fields set on the command line, by section; None values are ignored.

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown, or a value is invalid.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"--config {path}: no such file; give a cluster.yaml")
    _refuse_unknown_variables()
    given: dict[str, Any] = {
        section: kept
        for section, fields in overrides.items()
        if (kept := {name: value for name, value in fields.items() if value is not None})
    }

    class Settings(ClusterConfig):
        model_config = SettingsConfigDict(yaml_file=path)

    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError(explain(error, path, given)) from error
    except SettingsError as error:
        raise ConfigError(f"environment: {error}; give JSON") from error
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a YAML file of sections and settings: {what}") from error


def _refuse_unknown_variables() -> None:
    """Raise ConfigError for a variable that is meant for a setting, but that pydantic would ignore."""
    sections = [variable(field) for field in ClusterConfig.model_fields]
    for name, value in os.environ.items():
        section, between, _ = name.upper().partition(BETWEEN)
        if not section.startswith(PREFIX) or section in sections or _is_kubernetes(name, value):
            continue
        if between:
            known = ", ".join(sections)
            raise ConfigError(f"{name}: no such setting; names begin with one of {known}")
        if meant := next((s for s in sections if section.startswith(f"{s}_")), None):
            field = name[len(meant) :].lstrip("_")
            raise ConfigError(f"{name}: no such setting; is it {meant}{BETWEEN}{field}?")


def _is_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets a variable in every pod of the namespace of a Service called `eaas...`."""
    return bool(_SERVICE.search(name)) or (name.endswith("_PORT") and "://" in value)

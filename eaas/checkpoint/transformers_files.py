"""A checkpoint's configs as transformers reads them, for frontends and engines. No code of it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaas.checkpoint.config_file import SAME_AS
from eaas.errors import CheckpointError, UnsupportedModelError
from eaas.garbage_collection import collector_off
from eaas.log import one_line

__all__ = ["generation_config", "model_config"]


def model_config(directory: Path, fields: Mapping[str, Any], source: object) -> Any:
    """Make transformers' config of a model.

    Args:
        directory: Has config.json.
        fields: The content of config.json.
        source: Names the checkpoint in the error.

    Raises:
        UnsupportedModelError: transformers cannot make it.
    """
    with collector_off():
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture, model_type = SAME_AS.get(fields["model_type"], ("", ""))
    try:
        if architecture and fields.get("architectures") == [architecture]:
            known = {k: v for k, v in fields.items() if k not in ("auto_map", "model_type")}
            return CONFIG_MAPPING[model_type].from_dict(known, name_or_path=str(directory))
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"{source}: transformers cannot load the config of model_type "
            f"{fields['model_type']!r} ({one_line(error)}): use a model that transformers knows"
        ) from error


def generation_config(path: Path, config: Any) -> Any:
    """Return a checkpoint's own end tokens and sampling defaults, or those that its config has.

    Args:
        path: Directory of the checkpoint.
        config: transformers' config of the model.

    Raises:
        CheckpointError: generation_config.json cannot be read.
    """
    from transformers import GenerationConfig

    if not (path / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}/generation_config.json cannot be used ({one_line(error)}): repair or remove it"
        ) from error

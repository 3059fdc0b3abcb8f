"""What a frontend needs of a checkpoint: its tokenizer and its settings, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eaas.checkpoint.tokenizer import load_tokenizer
from eaas.errors import NotACheckpointError
from eaas.log import one_line

__all__ = ["ModelFiles"]


@dataclass(frozen=True)
class ModelFiles:
    """The files of a checkpoint that decide about requests and answers.

    Attributes:
        tokenizer: transformers' tokenizer.
        config: transformers' config of the model.
        generation_config: transformers' `GenerationConfig`, from generation_config.json or the config.
    """

    tokenizer: Any
    config: Any
    generation_config: Any

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the files of a checkpoint.

        Raises:
            NotACheckpointError: A file is missing or cannot be used.
        """
        from transformers import AutoConfig, GenerationConfig

        tokenizer = load_tokenizer(path)
        name = "config.json"
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            if (path / "generation_config.json").is_file():
                name = "generation_config.json"
                generation = GenerationConfig.from_pretrained(path, local_files_only=True)
            else:
                generation = GenerationConfig.from_model_config(config)
        except Exception as error:  # whatever a file makes transformers raise
            raise NotACheckpointError(
                f"{path}/{name} cannot be used ({one_line(error)}): download it again"
            ) from error
        return cls(tokenizer, config, generation)

"""What a frontend needs of a checkpoint: its tokenizer and its settings, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eaas.checkpoint.files import read_config
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.tokenizer import load_tokenizer
from eaas.checkpoint.transformers_files import generation_config, model_config

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
            CheckpointError: A file is missing or cannot be used.
        """
        tokenizer = load_tokenizer(path)
        config = model_config(path, read_config(LocalSource(path)), path)
        return cls(tokenizer, config, generation_config(path, config))

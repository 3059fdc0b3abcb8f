"""What a frontend needs of a checkpoint: its tokenizer and its settings, no weights.

They decide the longest sequence, and what requests leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eaas.checkpoint.files import read_config
from eaas.checkpoint.generation_file import GenerationFields
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.tokenizer import end_tokens, load_tokenizer
from eaas.checkpoint.transformers_files import generation_config, model_config
from eaas.generation.sampling import Sampling

__all__ = ["SHARED_SETTINGS", "Defaults", "ModelFiles", "context_length"]

SHARED_SETTINGS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
"""Fields of `Sampling` that both generation_config.json and requests have, under the same names."""
# Fields that change transformers' answers and not this endpoint's, with the value that changes nothing.
_NOT_DONE: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": None,
    "diversity_penalty": 0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_length": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "token_healing": False,
    "top_h": 1,
    "typical_p": 1,
    "watermarking_config": None,
}

# Their max_position_embeddings is the extended length already.
_UNSCALED = ("default", "llama3", "longrope")


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


@dataclass(frozen=True)
class Defaults:
    """A model's defaults, which follow vLLM's, except that `do_sample` must be true for a temperature.

    Attributes:
        sampling: Settings of a request without its own.
        max_tokens: Most tokens of an answer to a request that does not say; None: the endpoint decides.
        end_tokens: Tokens that end an answer: those of generation_config.json and the tokenizer's.
        ignored: Names of fields that would change an answer and do not.
    """

    sampling: Sampling
    max_tokens: int | None
    end_tokens: tuple[int, ...]
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, files: ModelFiles) -> Self:
        """Read the defaults of a model. End tokens beyond its vocabulary cannot occur.

        Raises:
            CheckpointError: A field has a value that no request may have.
        """
        given = files.generation_config.to_dict()
        file = "config.json" if given.get("_from_model_config") else "generation_config.json"
        fields = GenerationFields.of(file, given)
        chosen = fields.model_dump(include=SHARED_SETTINGS, exclude_none=True)
        settings = {"temperature": 1.0} | chosen | {"top_k": max(fields.top_k or 0, 0)}
        sampling = Sampling(**settings if fields.do_sample else settings | {"temperature": 0.0})
        vocabulary = files.config.get_text_config().vocab_size
        ends = end_tokens(fields, files.tokenizer, vocabulary)
        ignored = (
            name for name, neutral in _NOT_DONE.items() if given.get(name) not in (None, neutral)
        )
        return cls(sampling, fields.max_new_tokens, ends, tuple(ignored))


def context_length(config: Any) -> int | None:
    """Return the most tokens of a sequence, as vLLM derives it; None: the config has no limit.

    YaRN extends `original_max_position_embeddings` by its factor, whatever `max_position_embeddings` says:
    model cards add YaRN to a config and leave the old length there. Other scalings extend
    `max_position_embeddings`. Unlike vLLM, which serves LongRoPE's original length, this is the extended one.

    Args:
        config: transformers' config of a text model, which has every spelling as `rope_parameters`.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or of each type of layers that has its own.
    ropes = [parameters] if "rope_type" in parameters else parameters.values()
    scaled = [
        (rope["original_max_position_embeddings"] if rope["rope_type"] == "yarn" else positions)
        * (rope.get("factor") or 1)
        for rope in ropes
        if isinstance(rope, Mapping) and rope["rope_type"] not in _UNSCALED
    ]
    return int(max(scaled, default=positions))

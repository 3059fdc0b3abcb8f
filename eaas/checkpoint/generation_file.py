"""The fields of generation_config.json, and the bounds that requests have, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from eaas.errors import CheckpointError

__all__ = ["GenerationFields", "MinP", "RepetitionPenalty", "TopK", "TopP"]

# The largest number of float32, in which the next token is chosen; a larger one would be infinite there.
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
# The least number of float32 with all its digits. A device may take a smaller one for 0.
_FLOAT32_MIN = 2.0**-126


def _positive(value: float) -> float:
    if not _FLOAT32_MIN <= value <= _FLOAT32_MAX:
        raise ValueError("must be above 0 and finite, also in float32")
    return value


_POSITIVE = AfterValidator(_positive)
_POSITIVE_SCHEMA = {"type": "number", "minimum": _FLOAT32_MIN, "maximum": _FLOAT32_MAX}

TopP = Annotated[float, _POSITIVE, Field(le=1), WithJsonSchema(_POSITIVE_SCHEMA | {"maximum": 1})]
"""Probability of the tokens that nucleus sampling keeps."""
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
"""Number of likeliest tokens to keep; 0 and -1: all."""
MinP = Annotated[float, Field(ge=0, le=1)]
"""Least probability to keep, as a part of the likeliest token's."""
RepetitionPenalty = Annotated[float, _POSITIVE, WithJsonSchema(_POSITIVE_SCHEMA)]
"""Factor between logits, which makes no logit NaN."""


class GenerationFields(BaseModel):
    """What a checkpoint decides for requests that do not; then fields that only transformers reads."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=_FLOAT32_MAX)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    eos_token_id: int | list[int] | None = None

    bos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    typical_p: float | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    num_beams: int | None = None
    num_return_sequences: int | None = None
    no_repeat_ngram_size: int | None = None
    suppress_tokens: list[Any] | None = None
    begin_suppress_tokens: list[Any] | None = None

    @classmethod
    def of(cls, place: str, document: Mapping[str, Any]) -> Self:
        """Read the fields of a JSON object.

        Args:
            place: Names the file in messages.
            document: Its content.

        Raises:
            CheckpointError: A field has another kind, or a value that no request may have.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = first["loc"][0]
            shown = json.dumps(document[str(name)], default=str)[:40]
            reason = first["msg"].removeprefix("Value error, ")
            raise CheckpointError(
                f"{place}: {name} is {shown} ({reason}): change or remove it"
            ) from None

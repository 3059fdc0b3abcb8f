"""Types of the fields of the HTTP endpoint's bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)

__all__ = [
    "MOST_PROMPTS",
    "NO_EFFECT",
    "REFUSED",
    "BadWords",
    "Bias",
    "ModelName",
    "Prompts",
    "Seed",
    "Stops",
    "Strict",
    "ToolChoice",
    "Whole",
    "other_fields",
]

_STOPS = 16
_STOP_CHARACTERS = 1024
_MOST_BIASED = 1024
_MOST_BAD_WORDS = 128
_INT64 = 2**63

MOST_PROMPTS = 1024
"""Most prompts of one request."""


class Strict(BaseModel):
    """Base of bodies and their parts: no conversions between types, unknown fields are ignored."""

    model_config = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


NO_EFFECT = "Has no effect on the answer."
"""The description of a known field that changes no answer of this engine."""


REFUSED = "Is not supported: refused, except for a value that changes nothing."
"""The description of a known field that this engine does not have."""


def other_fields(name: str) -> Any:
    """Return a base for a class of bodies: the known fields that are refused or change no answer.

    Args:
        name: The class in other_fields.json.
    """
    table = _OTHER_FIELDS[name]
    ignored = Annotated[Any, Field(description=NO_EFFECT)]
    fields: dict[str, Any] = dict.fromkeys(table["no_effect"], (ignored, None))
    fields |= {field: (_refused(**rule), None) for field, rule in table["refused"].items()}
    return create_model(f"Other{name}", __base__=Strict, **fields)


_OTHER_FIELDS = json.loads(resources.files(__package__).joinpath("other_fields.json").read_text())


def _refused(neutral: Sequence[Any] = (), vllm: bool = False, instead: str = "") -> Any:
    """Return the type of a field that takes None and the neutral values only.

    Args:
        neutral: The values that change nothing.
        vllm: Whether vLLM, the other engine, supports the field.
        instead: What the client can do.
    """
    allowed = " or ".join(map(json.dumps, neutral))
    other = f" other than {allowed}" if allowed else ""
    remedy = "the engine of `eaas up --engine vllm` has it" if vllm else instead
    reason = f"is not supported{other}{remedy and '; '}{remedy}"

    def check(value: Any) -> Any:
        # 0 is no False.
        kind = isinstance(value, bool)
        if value is None or any(value == x and kind == isinstance(x, bool) for x in neutral):
            return value
        raise ValueError(reason)

    schema = WithJsonSchema({"enum": [None, *neutral]})
    return Annotated[Any, AfterValidator(check), schema, Field(description=REFUSED)]


class _FunctionName(Strict):
    name: str


class _ByName(Strict):
    type: Literal["function"]
    function: _FunctionName


_Chosen = Literal["auto", "none", "required"] | None
_Tokens = Annotated[list[int], Field(min_length=1)]
_Several = Annotated[list[str | _Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
_Stop = Annotated[str, Field(min_length=1, max_length=_STOP_CHARACTERS)]
_SomeStops = Annotated[list[_Stop], Field(max_length=_STOPS)]
_Token = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


def _prompts(value: Any) -> list[Any]:
    """Return a list of prompts, each a string or a list of token ids."""
    found = [value] if isinstance(value, str) or _is_tokens(value) else value
    is_list = isinstance(found, list) and bool(found)
    if not is_list or not all(isinstance(each, str) or _is_tokens(each) for each in found):
        raise ValueError("must be a string, a list of token ids, or a list of these")
    if len(found) > MOST_PROMPTS:
        raise ValueError(f"has {len(found)} prompts; the limit is {MOST_PROMPTS}")
    return list(found)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("auto", "none", "required"):
        return value
    try:
        return _ByName.model_validate(value).model_dump()
    except ValidationError:
        raise ValueError(
            "must be auto, none, required or a function: "
            '{"type": "function", "function": {"name": NAME}}'
        ) from None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Stops = Annotated[
    _SomeStops, BeforeValidator(_stops, json_schema_input_type=_Stop | _SomeStops | None)
]
"""Stop strings: one, or a list."""
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | _Tokens | _Several),
]
"""Prompts: one or a list, each a string or token ids."""
Bias = Annotated[
    dict[_Token, _Bias],
    Field(max_length=_MOST_BIASED, json_schema_extra={"additionalProperties": False}),
]
"""What is added to the logits of tokens, by token id."""
ToolChoice = Annotated[Any, BeforeValidator(_tool_choice, json_schema_input_type=_Chosen | _ByName)]
"""auto, none, required, or a function by name."""
Whole = BeforeValidator(_whole)
"""Takes a whole float, such as 16.0, for an integer. Stands after the bounds, or the JSON schema has none."""
Seed = Annotated[
    int,
    Field(ge=-_INT64, lt=_INT64),
    AfterValidator(lambda seed: None if seed == -1 else seed),
    Whole,
]
"""Seed of the draws; -1: random."""
ModelName = Annotated[str, AfterValidator(lambda name: name or None)]
"""A model's name; empty: the one that is served."""
BadWords = Annotated[list[_Stop], Field(max_length=_MOST_BAD_WORDS)]
"""Texts that the answer must not have."""

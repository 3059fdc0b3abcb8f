"""Checks of the fields of the HTTP endpoint's bodies, with their JSON schemas."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core.core_schema import no_info_after_validator_function

__all__ = [
    "MOST_PROMPTS",
    "NO_EFFECT",
    "BadWords",
    "Bias",
    "ModelName",
    "NoEffect",
    "Prompts",
    "Seed",
    "Stops",
    "Strict",
    "ToolChoice",
    "Whole",
    "unsupported",
]

_STOPS = 16
_STOP_CHARACTERS = 1024
_MOST_BIASED = 1024
_MOST_BAD_WORDS = 128
_INT64 = 2**63
_TOKEN_ID = "[0-9]{1,10}"

MOST_PROMPTS = 1024
"""Most prompts of one request."""


class Strict(BaseModel):
    """Base of bodies and their parts: no conversions between types, unknown fields are ignored."""

    model_config = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


NO_EFFECT = "Has no effect on the answer."
NoEffect = Annotated[Any, Field(description=NO_EFFECT)]
"""A known field that changes no answer of this engine."""


class unsupported:
    """Refuses every value except None and the neutral ones: the field is not supported.

    Args:
        neutral: The values that change nothing.
        vllm: Whether vLLM, the other engine, supports the field.
        instead: What the client can do.
    """

    def __init__(self, *neutral: Any, vllm: bool = False, instead: str = "") -> None:
        self._neutral = neutral
        self._remedy = "; the engine of `eaas up --engine vllm` has it" if vllm else ""
        self._remedy = f"; {instead}" if instead else self._remedy

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": [None, *self._neutral]}

    def _check(self, value: Any) -> Any:
        # 0 is no False.
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self._neutral
        ):
            allowed = " or ".join(json.dumps(each) for each in self._neutral)
            raise ValueError(
                "is not supported" + (f" other than {allowed}" if allowed else "") + self._remedy
            )
        return value


_STOP = {"type": "string", "minLength": 1, "maxLength": _STOP_CHARACTERS}
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _TOKENS]},
    "minItems": 1,
    "maxItems": MOST_PROMPTS,
}
# The JSON schemas of the checks below.
_STOPS_SCHEMA = {
    "anyOf": [{"type": "null"}, _STOP, {"type": "array", "items": _STOP, "maxItems": _STOPS}]
}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS, _PROMPTS]}
_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_TOKEN_ID}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MOST_BIASED,
        },
    ]
}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": [None, "auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a non-empty string or a list of them")
    if len(stops) > _STOPS:
        raise ValueError(f"has {len(stops)} strings; the limit is {_STOPS}")
    longest = max(map(len, stops), default=0)
    if longest > _STOP_CHARACTERS:
        raise ValueError(
            f"has a string of {longest} characters; the limit is {_STOP_CHARACTERS} characters each"
        )
    return stops


def _prompts(value: Any) -> list[Any]:
    """Return a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and len(value) > MOST_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; the limit is {MOST_PROMPTS}")
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(each, str) or _is_tokens(each) for each in value):
        return list(value)
    raise ValueError("must be a string, a list of token ids, or a list of these")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > _MOST_BIASED:
        raise ValueError(f"has {len(value)} tokens; the limit is {_MOST_BIASED}")
    for token, bias in value.items():
        if not re.fullmatch(_TOKEN_ID, token):
            raise ValueError("must have token ids as keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("must have values from -100 to 100")
    return value


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("auto", "none", "required"):
        return value
    try:
        name = value["function"]["name"]
        if value["type"] == "function" and isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
    except (TypeError, KeyError):
        pass
    raise ValueError(
        "must be auto, none, required or a function: "
        '{"type": "function", "function": {"name": NAME}}'
    )


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Stops = Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOPS_SCHEMA)]
"""Stop strings: one, or a list."""
Prompts = Annotated[
    list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)
]
"""Prompts: one or a list, each a string or token ids."""
Bias = Annotated[dict[str, float] | None, BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)]
"""What is added to the logits of tokens, by token id."""
ToolChoice = Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)]
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
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_STOP_CHARACTERS)]],
    Field(max_length=_MOST_BAD_WORDS),
]
"""Texts that the answer must not have."""

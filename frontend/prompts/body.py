"""What the JSON bodies of all paths have: their base, the types of their fields, and their validation.

An unknown field is ignored, as in vLLM, and named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeVar, get_args
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import from_json

from eaas.generation.errors import ApiError

__all__ = [
    "MOST_PROMPTS",
    "NO_EFFECT",
    "REFUSED",
    "BadWords",
    "Bias",
    "Body",
    "FieldError",
    "ModelName",
    "Prompts",
    "RequestT",
    "Seed",
    "Stops",
    "Strict",
    "ToolChoice",
    "Whole",
    "check_depth",
    "load_json",
    "other_fields",
    "parse",
]

_MOST_IGNORED = 16  # names of ignored fields to report
_NAME_CHARACTERS = 40  # of each
# The fields that the endpoint needs only to be there, once the prompt is read.
_READ = {"messages": [{"role": "user", "content": ""}], "prompt": "", "tokens": []}
_ONLY_READ = _READ.keys() | {"documents", "chat_template_kwargs"}

_STOPS = 16
_STOP_CHARACTERS = 1024
_MOST_BIASED = 1024
_MOST_BAD_WORDS = 128
_INT64 = 2**63
_MOST_DEPTH = 100

MOST_PROMPTS = 1024
"""Most prompts of one request."""


class FieldError(ValueError):
    """A wrong value of a field that depends on other fields; raised where pydantic does not know its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def check_depth(value: Any, most: int = _MOST_DEPTH) -> Any:
    """Return JSON unchanged. Raises ValueError if it is nested so deeply that llguidance would refuse it.

    Python could parse such JSON, and then fail to write it where less of its stack is free.
    """
    if most == 0:
        raise ValueError(f"is nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            check_depth(inner, most - 1)
    return value


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


class Body(Strict):
    """What the bodies of all paths have."""

    model: ModelName | None = None

    _found: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate the JSON object of a request's body. Raises ApiError (400) that names the field."""
        return parse(cls, fields)

    @property
    def found(self) -> dict[str, Any]:
        """What reading found beside the settings, as JSON; readers add to it."""
        return self._found

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the body's unknown fields, at most some; the request is answered without them."""
        return tuple(self.found["ignored"])

    @property
    def ignored_header(self) -> dict[str, str]:
        """The header of the answer that names the ignored fields, percent-encoded and cut; empty: none."""
        # Names come from the client: percent-encoded, they hold neither line ends nor commas. An empty one is
        # quoted, because a header must not end with a space.
        named = (quote(name[:_NAME_CHARACTERS], safe="") or '""' for name in self.ignored)
        return {"X-Eaas-Ignored-Fields": ", ".join(named)} if self.ignored else {}

    def settings(self) -> dict[str, Any]:
        """Return a small body that parses to this request without its prompt: the prompt worker's answer."""
        known = type(self).model_fields.items()
        unused = {name for name, field in known if field.description == NO_EFFECT}
        read = {
            name: value for name, value in _READ.items() if getattr(self, name, None) is not None
        }
        unused |= _ONLY_READ
        return read | self.model_dump(exclude=unused, exclude_unset=True, by_alias=True)


RequestT = TypeVar("RequestT", bound=Body)


def load_json(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request's body, the first step of reading it. Raises ApiError (400)."""
    try:
        # Refuses half of a surrogate pair, which neither tokenizers nor sockets take.
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return fields


def parse(cls: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Validate a request's JSON object, before tokenization. Raises ApiError (400) that names the field."""
    try:
        request = cls.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    request.found["ignored"] = list(islice(_unknown(cls, body), _MOST_IGNORED))
    return request


def _unknown(cls: type[BaseModel], value: Any, name: str = "") -> Iterator[str]:
    """Return the names of fields that a class ignores, also in the objects and lists of its own fields.

    Null and what is empty says nothing, so nothing of it is ignored.
    """
    if isinstance(value, list):
        for at, each in enumerate(value):
            yield from _unknown(cls, each, f"{name}[{at}]")
    elif isinstance(value, dict) and cls.model_config.get("extra") != "allow":
        known, prefix = _known(cls), f"{name}." if name else ""
        for each, inner in value.items():
            if each not in known and inner not in (None, "", [], {}):
                yield prefix + each
        for each, kind in known.items():
            if kind is not None and each in value:
                yield from _unknown(kind, value[each], prefix + each)


@cache
def _known(cls: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return the fields of a class, each with the class of the objects in it."""
    fields = cls.model_fields.items()
    return {field.alias or name: _model(field.annotation) for name, field in fields}


def _model(kind: Any) -> type[BaseModel] | None:
    """Return the class of objects in a type such as `list[Tool] | None`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next(filter(None, map(_model, get_args(kind))), None)


def _refusal(error: ValidationError) -> ApiError:
    """Convert the first validation error of a body to the client's error."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        if part == "[key]":
            continue  # a wrong key, which stands before this
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = cause.field
    reason = first["msg"].removeprefix("Value error, ")
    told = f"'{param}': {reason}." if param else f"{reason}."
    message, code = {
        "extra_forbidden": (f"Unknown parameter: '{param}'.", "unknown_parameter"),
        "missing": (f"Missing required parameter: '{param}'.", "missing_required_parameter"),
    }.get(first["type"], (told, "invalid_value"))
    return ApiError(400, message, param=param or None, code=code)

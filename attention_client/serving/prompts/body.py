"""What the JSON bodies of all paths have, and their validation.

An unknown field is ignored, as in vLLM, and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, Self, TypeVar, get_args
from urllib.parse import quote

from pydantic import BaseModel, PrivateAttr, ValidationError
from pydantic_core import from_json

from attention_client.serving.grammars.constraint import FieldError
from attention_client.serving.prompts.fields import NO_EFFECT, ModelName, Strict
from eaas.generation.errors import ApiError

__all__ = ["Body", "RequestT", "load_json", "parse"]

_MOST_IGNORED = 16  # names of ignored fields to report
_NAME_CHARACTERS = 40  # of each
# The fields that the endpoint needs only to be there, once the prompt is read.
_READ = {"messages": [{"role": "user", "content": ""}], "prompt": "", "tokens": []}
_ONLY_READ = _READ.keys() | {"documents", "chat_template_kwargs"}


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

"""The fields of a request's body that restrict the form of its answer: OpenAI's and vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from attention_client.serving.grammars.source import Part

__all__ = [
    "Constraint",
    "ConstraintFields",
    "FieldError",
    "JsonSchema",
    "ResponseFormat",
    "StructuredOutputs",
    "check_depth",
]

_MOST_BYTES = 64 * 2**10
_MOST_DEPTH = 100
_ANY_OBJECT = json.dumps({"type": "object"})


class FieldError(ValueError):
    """A wrong value of a field that depends on other fields; raised where pydantic does not know its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


@dataclass(frozen=True)
class Constraint:
    """A form that an answer must have.

    Attributes:
        field: The field of the body that asks for it, for errors.
        part: The grammar of the whole answer.
    """

    field: str
    part: Part

    @property
    def is_raw(self) -> bool:
        """Whether the grammar covers the markup of an answer, too, such as that of its reasoning."""
        return self.part.kind in ("regex", "grammar")


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


def _schema(value: Any) -> Any:
    """Return a JSON schema that is an object, or text that holds one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema") from None
    if value is not None and not isinstance(value, (dict, bool)):
        raise ValueError("must be a JSON schema: an object")
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError for JSON that is nested so deeply that llguidance would refuse it.

    Python could parse such JSON, and then fail to write it where less of its stack is free.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise ValueError(f"is nested more than {_MOST_DEPTH} levels deep")
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]


def _choices(value: Any) -> Any:
    if value is not None and (
        not isinstance(value, list)
        or not value
        or not all(isinstance(text, str) and text for text in value)
    ):
        raise ValueError("must be a list of non-empty strings")
    return value


_SCHEMA = {
    "anyOf": [
        {"type": ["object", "boolean", "null"]},
        {"type": "string", "pattern": r"^\s*(\{[\s\S]*\}|true|false)\s*$"},
    ]
}
JsonSchema = Annotated[Any, BeforeValidator(_schema), WithJsonSchema(_SCHEMA)]
_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_Choice = Annotated[
    Any, BeforeValidator(_choices), WithJsonSchema({"anyOf": [{"type": "null"}, _TEXTS]})
]


def _format(value: Any) -> Any:
    return {"type": "object"} if value == "json" else None if value == "" else _schema(value)


_Format = Annotated[
    Any,
    BeforeValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, *_SCHEMA["anyOf"]]}),
]


class NamedSchema(_Fields):
    """The JSON schema of an answer in OpenAI's form. An answer always follows it, strict or not."""

    name: str
    description: str | None = None
    definition: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> NamedSchema:
        if self.definition is None:
            raise ValueError("schema is missing")
        return self


class ResponseFormat(_Fields):
    """OpenAI's form of a constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    # llama.cpp's place of the schema.
    definition: Annotated[JsonSchema, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _one_schema(self) -> ResponseFormat:
        given = (self.json_schema is not None) + (self.definition is not None)
        fits = {
            "text": not given,
            "json_object": self.json_schema is None,
            "json_schema": given == 1,
        }
        if not fits[self.type]:
            raise ValueError("type json_schema and a schema need each other")
        return self


class StructuredOutputs(_Fields):
    """vLLM's form of a constraint: exactly one field."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    definition: Annotated[JsonSchema, Field(alias="json")] = None
    regex: str | None = None
    choice: _Choice = None
    grammar: str | None = None
    json_object: bool | None = None

    # Not supported; vLLM's client writes the neutral values.
    disable_additional_properties: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    structural_tag: None = None
    whitespace_pattern: None = None

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        kinds = (self.definition, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar and json_object")
        return self


class ConstraintFields(BaseModel):
    """The constraint fields of a request, of which one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names.
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: _Choice = None
    guided_grammar: str | None = None
    # Names of llama.cpp, SGLang and Ollama.
    json_schema: JsonSchema = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    format: _Format = None

    @model_validator(mode="after")
    def _one_constraint(self) -> ConstraintFields:
        found = self._constraints()
        if len(found) > 1:
            raise FieldError(
                found[1].field, f"and {found[0].field} exclude each other: use only one"
            )
        for each in found:
            size = len(each.part.text.encode())
            if size > _MOST_BYTES:
                raise FieldError(each.field, f"has {size} bytes; the limit is {_MOST_BYTES} bytes")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have; None: any text."""
        found = self._constraints()
        return found[0] if found else None

    def _constraints(self) -> list[Constraint]:
        found = [
            *_of_format(self.response_format),
            *_of_structured(self.structured_outputs),
            _json("guided_json", self.guided_json),
            _text("guided_regex", "regex", self.guided_regex),
            _choice("guided_choice", self.guided_choice),
            _text("guided_grammar", "grammar", self.guided_grammar),
            _json("json_schema", self.json_schema),
            _text("regex", "regex", self.regex or None),
            _text("grammar", "grammar", self.grammar or None),
            _text("ebnf", "grammar", self.ebnf or None),
            _json("format", self.format),
        ]
        return [each for each in found if each is not None]


def _of_format(form: ResponseFormat | None) -> list[Constraint | None]:
    if form is None or form.type == "text":
        return []
    if form.definition is not None:
        return [_json("response_format.schema", form.definition)]
    if form.json_schema is None:
        return [_text("response_format", "json", _ANY_OBJECT)]
    return [_json("response_format.json_schema.schema", form.json_schema.definition)]


def _of_structured(form: StructuredOutputs | None) -> list[Constraint | None]:
    if form is None:
        return []
    name = "structured_outputs"
    return [
        _json(f"{name}.json", form.definition),
        _text(f"{name}.regex", "regex", form.regex),
        _choice(f"{name}.choice", form.choice),
        _text(f"{name}.grammar", "grammar", form.grammar),
        _text(f"{name}.json_object", "json", _ANY_OBJECT if form.json_object else None),
    ]


def _json(field: str, schema: Any) -> Constraint | None:
    return None if schema is None else _text(field, "json", json.dumps(schema, ensure_ascii=False))


def _choice(field: str, choices: list[str] | None) -> Constraint | None:
    if choices is None:
        return None
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    return _text(field, "lark", f"start: {texts}")


def _text(
    field: str, kind: Literal["json", "regex", "grammar", "lark"], text: str | None
) -> Constraint | None:
    if text is None:
        return None
    return Constraint(field=field, part=Part(name="answer", kind=kind, text=text))

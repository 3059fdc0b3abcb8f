"""The fields of a request's body that restrict the form of its answer: OpenAI's and vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from frontend.grammars import Part
from frontend.prompts.body import FieldError, Strict, check_depth

__all__ = ["Constraint", "ConstraintFields", "JsonSchema", "ResponseFormat", "StructuredOutputs"]

_MOST_BYTES = 64 * 2**10
_ANY_OBJECT = {"type": "object"}
_Kind = Literal["json", "regex", "choice", "grammar"]


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


def _schema(value: Any) -> Any:
    """Return a JSON schema that is an object, or text that holds one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema") from None
    if value is not None and not isinstance(value, (dict, bool)):
        raise ValueError("must be a JSON schema: an object")
    return check_depth(value)


_SCHEMA = {
    "anyOf": [
        {"type": ["object", "boolean", "null"]},
        {"type": "string", "pattern": r"^\s*(\{[\s\S]*\}|true|false)\s*$"},
    ]
}
JsonSchema = Annotated[Any, BeforeValidator(_schema), WithJsonSchema(_SCHEMA)]
_Choice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None


def _format(value: Any) -> Any:
    return _ANY_OBJECT if value == "json" else None if value == "" else _schema(value)


_Format = Annotated[
    Any,
    BeforeValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, *_SCHEMA["anyOf"]]}),
]


class NamedSchema(Strict):
    """The JSON schema of an answer in OpenAI's form. An answer always follows it, strict or not."""

    name: str
    description: str | None = None
    definition: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's form of a constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    # llama.cpp's place of the schema.
    definition: Annotated[JsonSchema, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _one_schema(self) -> ResponseFormat:
        named = self.json_schema and self.json_schema.definition
        given = [each for each in (self.definition, named) if each is not None]
        fits = {
            "text": not given,
            "json_object": self.json_schema is None,
            "json_schema": len(given) == 1,
        }
        if not fits[self.type]:
            raise ValueError("type json_schema and a schema need each other")
        return self


class StructuredOutputs(Strict):
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
            raise FieldError(found[1].field, f"excludes {found[0].field}: use only one")
        if self.structured_outputs is not None and not found:
            raise FieldError(
                "structured_outputs", "needs one of json, regex, choice, grammar and json_object"
            )
        for each in found:
            size = len(each.part.text.encode())
            if size > _MOST_BYTES:
                raise FieldError(each.field, f"has {size} bytes; the limit is {_MOST_BYTES} bytes")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have; None: any text."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        form = self.response_format or ResponseFormat(type="text")
        structured = self.structured_outputs or StructuredOutputs.model_construct()
        is_any = form.type == "json_object" and form.definition is None
        named = form.json_schema
        given: list[tuple[str, _Kind, Any]] = [
            ("response_format", "json", _ANY_OBJECT if is_any else None),
            ("response_format.schema", "json", form.definition),
            ("response_format.json_schema.schema", "json", named and named.definition),
            ("structured_outputs.json", "json", structured.definition),
            ("structured_outputs.regex", "regex", structured.regex),
            ("structured_outputs.choice", "choice", structured.choice),
            ("structured_outputs.grammar", "grammar", structured.grammar),
            (
                "structured_outputs.json_object",
                "json",
                _ANY_OBJECT if structured.json_object else None,
            ),
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("json_schema", "json", self.json_schema),
            ("regex", "regex", self.regex or None),
            ("grammar", "grammar", self.grammar or None),
            ("ebnf", "grammar", self.ebnf or None),
            ("format", "json", self.format),
        ]
        return [Constraint(field, _part(*each)) for field, *each in given if each[1] is not None]


def _part(kind: _Kind, value: Any) -> Part:
    if kind == "json":
        return Part("answer", kind, json.dumps(value, ensure_ascii=False))
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        return Part("answer", "lark", f"start: {texts}")
    return Part("answer", kind, value)

"""JSON schemas that llguidance does not take as they are: done by narrowing, or refused with the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from byte_tokenizer import byte_tokenizer
from eaas.generation.errors import ApiError
from frontend.grammars.compiler import GrammarCompiler
from guided import compiled, part, random_answer

TOKENIZER = byte_tokenizer("<unk>", "</s>", eos_token="</s>")
VOCABULARY = 258
LOOK_AHEAD = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY, [257])
    yield compiler
    compiler.close()


def record(**properties: Any) -> dict[str, Any]:
    fields = {"properties": properties, "required": list(properties)}
    return {"type": "object", **fields, "additionalProperties": False}


def tagged(tag: str, **properties: Any) -> dict[str, Any]:
    return record(kind={"const": tag}, **properties)


DISCRIMINATED = {
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
}


SHORT = {"type": "string", "maxLength": 5}


def several(items: Any, most: int = 2, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


USUAL: list[dict[str, Any]] = [
    record(name={"type": "string", "maxLength": 6}, age=DIGIT, kind={"enum": ["a", "b"]}),
    record(),
    record(x=DIGIT, y={"type": "integer", "exclusiveMinimum": -100, "maximum": 100}),
    record(price={"type": "number", "minimum": 0.5, "maximum": 2}),
    record(yes={"type": "boolean"}, none={"type": "null"}),
    record(kind={"enum": ["red", "grün", 7, None, False, ["x"]]}),
    record(version={"const": {"major": 1, "tags": []}}),
    record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    record(text={"type": "string", "minLength": 3, "maxLength": 12}),
    record(day={"type": "string", "format": "date"}),
    record(id={"type": "string", "format": "uuid"}),
    record(host={"type": "string", "format": "ipv4"}),
    record(tags=several({"enum": ["a", "b"]}, most=4, least=2)),
    record(grid=several(several(DIGIT, most=3, least=1))),
    record(pair={"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2}),
    record(a=record(b=record(c=record(d=DIGIT)))),
    record(value={"anyOf": [DIGIT, SHORT, {"type": "null"}]}),
    record(value={"type": ["boolean", "null"]}, **{'q"uo\\te': DIGIT, "é 日": SHORT}),
    {"type": "object", "properties": {"a": DIGIT, "b": SHORT}, "additionalProperties": False},
    {
        "$defs": {
            "node": record(name=SHORT, next={"anyOf": [DIGIT, {"$ref": "#/$defs/leaf"}]}),
            "leaf": record(leaf={"allOf": [DIGIT, {"minimum": 5}]}),
        },
        **record(nodes=several({"$ref": "#/$defs/node"})),
    },
]


@pytest.mark.parametrize("schema", USUAL)
def test_answers_follow_their_schemas(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    # Not "date": RFC 3339 has a year 0, and Python has none.
    checker = jsonschema.FormatChecker(("uuid", "ipv4"))
    grammar = compiled(compiler, part("json", json.dumps(schema)))
    for seed in range(6):
        answer = random_answer(grammar, VOCABULARY, seed)
        assert answer is not None
        jsonschema.validate(json.loads(TOKENIZER.decode(answer)), schema, format_checker=checker)


@pytest.mark.parametrize(
    "schema",
    [
        record(amount={"anyOf": [DIGIT, LOOK_AHEAD]}),
        record(amount={"anyOf": [{"not": {}}, LOOK_AHEAD, DIGIT]}),
        record(few={"type": "array", "maxItems": 2, "items": {"anyOf": [LOOK_AHEAD, DIGIT]}}),
        record(a={"$ref": "#/$defs/x~1 y"}) | {"$defs": {"x/ y": {"anyOf": [LOOK_AHEAD, DIGIT]}}},
        record(a={"anyOf": [LOOK_AHEAD, DIGIT]}, b={"$ref": "#/properties/a"}),
        # A reference to the whole is an alternative that stays.
        record(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}, a={"anyOf": [LOOK_AHEAD, DIGIT]}),
        # The same one twice.
        {
            "$defs": {"wrong": {"not": DIGIT}},
            **record(**{key: {"anyOf": [{"$ref": "#/$defs/wrong"}, DIGIT]} for key in "ab"}),
        },
        record(color={"type": "string", "format": "color", "maxLength": 3}),
        record(format={"type": "string", "format": "uint8", "pattern": "^[a-c]$"}),
        record(anyOf={"type": "array", "maxItems": 2, "items": {"anyOf": [LOOK_AHEAD, DIGIT]}}),
        record(tags={"type": "array", "items": DIGIT, "maxItems": 3, "uniqueItems": False}),
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": DIGIT,
            "maxProperties": 2,
        },
        {
            "$defs": {"A": tagged("a", x={"anyOf": [LOOK_AHEAD, DIGIT]}), "B": tagged("b")},
            **record(v=DISCRIMINATED),
        },
    ],
)
def test_what_narrows_the_answer_is_done(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    answers = set()
    grammar = compiled(compiler, part("json", json.dumps(schema)))
    for seed in range(12):
        tokens = random_answer(grammar, VOCABULARY, seed)
        if tokens is not None:
            answers.add(TOKENIZER.decode(tokens))
            jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
    assert len(answers) > 2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (record(tags={"type": "array", "uniqueItems": True}), r"properties\.tags: .*uniqueItems"),
        (record(a=record(b={"contains": DIGIT})), r"properties\.a\.properties\.b: .*contains"),
        (record(a={"anyOf": [LOOK_AHEAD]}), r"properties\.a\.anyOf\[0\]: look-around"),
        (
            record(a={"type": "array", "prefixItems": [DIGIT, {"not": {}}]}),
            r"prefixItems\[1\]: .*not",
        ),
        (record(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"not": DIGIT}}}, r"\$defs\.b: .*not"),
        (record(a={"$ref": "#/$defs/b"}), r"properties\.a: .*/\$defs/b.* does not exist"),
        ({"if": {}, "then": DIGIT}, "'f': .*if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": DIGIT}}, "dependentSchemas"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        # Without the look-ahead's alternative, a text would fit the other one.
        (
            {"oneOf": [{"anyOf": [DIGIT, LOOK_AHEAD]}, {"type": "string"}]},
            r"anyOf\[1\]: look-around",
        ),
        # pydantic does not require a tag that is the default.
        (
            {
                "$defs": {name: tagged(name) | {"required": []} for name in ("A", "B")},
                **record(v=DISCRIMINATED),
            },
            r"properties\.v: oneOf .* by a required constant",
        ),
        (record(a={"oneOf": [DIGIT, {"minimum": 5}]}), r"properties\.a: oneOf .*anyOf"),
        # No option of llguidance's makes it ignore what it cannot do.
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place(
    compiler: GrammarCompiler, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        compiled(compiler, part("json", json.dumps(schema)))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"type": "array", "items": DIGIT, "minItems": 2}, [1]),
        ({"type": "array", "prefixItems": [DIGIT], "items": False}, [1, 2]),
        ({"type": "array", "items": [DIGIT], "additionalItems": False}, [1, 2]),
        ({"type": "object", "patternProperties": {"^x": DIGIT}}, {"x": "a"}),
        (
            {"type": "object", "patternProperties": {"^x": DIGIT}, "additionalProperties": False},
            {"y": 1},
        ),
        ({"type": "object", "minProperties": 2}, {"a": 1}),
        ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
        ({"required": ["a"]}, {}),
        ({"enum": [1, 5], "minimum": 3}, 1),
        ({"enum": [[1], ["a"]], "items": {"type": "string"}}, [1]),
        ({"type": "integer", "multipleOf": 3}, 4),
        ({"type": "number", "exclusiveMaximum": 3}, 3),
        ({"type": "string", "format": "date"}, "x"),
        ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "a"),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, "aaa"),
        ({"type": "integer", "minimum": 3, "anyOf": [{"maximum": 5}, {"minimum": 99}]}, 50),
        ({"$defs": {"i": DIGIT}, "$ref": "#/$defs/i", "minimum": 3}, 2),
        ({"$defs": {"i": {"$anchor": "i", **DIGIT}}, "$ref": "#i"}, 10),
    ],
)
def test_a_keyword_of_either_draft_holds(
    compiler: GrammarCompiler, schema: dict[str, Any], wrong: Any
) -> None:
    matcher = compiled(compiler, part("json", json.dumps(schema))).start.deep_copy()
    tokens = TOKENIZER(json.dumps(wrong, separators=(",", ":")))["input_ids"]
    assert matcher.validate_tokens([*tokens, 257]) < len(tokens) + 1

"""Checks one grammar in a process of its own: `python -m frontend.grammars.check`.

llguidance bounds most of its work, but some grammars overflow its stack or compile for a minute. Such a
grammar ends this process, not the endpoint. The process starts in 0.1 s, because it imports neither torch
nor transformers and takes bytes for tokens.

It reads one JSON object, {"vocabulary": SIZE, "parts": [PART, ...]}, and writes one: {"grammar": TEXT} for
`LLMatcher`, or {"error": REASON}.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from eaas.generation.matchers import matcher_of
from frontend.grammars import Part

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["main"]

_CPU_S = 3
_MOST_MEMORY = 2 * 2**30  # bytes of address space
_STACK = 2**20  # bytes
_END = 256
# One space, or one line break and an indentation. A weak model fills whatever more it may write.
_WHITE_SPACE: JsonCompileOptions = {"whitespace_pattern": r"( |\n {0,20}|\n\t{0,10})"}

_Schema = dict[str, Any]

_TARGETS = "#/$defs/"
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_ONE_OR_LIST = ("anyOf", "oneOf", "allOf", "items", "prefixItems", "additionalProperties")
# llguidance refuses these keywords, also with a value that allows everything.
_NEUTRAL = (("uniqueItems", False), ("propertyNames", {"type": "string"}))
_ONE_OF_REMEDY = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Use anyOf, or alternatives that exclude each other by a required constant",
)


class _Bytes:
    """The tokens of llguidance's interface: 256 bytes, an end, and empty ones up to the vocabulary."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self, vocabulary: int) -> None:
        others = max(0, vocabulary - _END - 1)
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *[b""] * others]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Check the grammar on the standard input."""
    for what, most in ((resource.RLIMIT_CPU, _CPU_S), (resource.RLIMIT_AS, _MOST_MEMORY)):
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The endpoint's threads have more stack, so a grammar that passes here does not overflow theirs.
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_check)
    thread.start()
    thread.join()


def _check() -> None:
    asked = json.load(sys.stdin.buffer)
    tokens = LLTokenizer(TokenizerWrapper(_Bytes(asked["vocabulary"])))
    try:
        answer = {"grammar": _compiled(tokens, [Part(**part) for part in asked["parts"]])}
    except (ValueError, RecursionError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _compiled(tokens: LLTokenizer, parts: list[Part]) -> str:
    """Return the grammar for `LLMatcher`. Raises ValueError."""
    grammar = json.dumps({"grammars": [_converted(part) for part in parts]})
    try:
        matcher = matcher_of(tokens, grammar)
    except ValueError:
        repaired = [_repaired(tokens, part) for part in parts]
        if repaired == parts:
            raise
        return _compiled(tokens, repaired)
    matcher.compute_bitmask()
    # Stopped before an answer: there is none that follows the grammar.
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise ValueError(matcher.get_error() or "no answer can follow it")
    return grammar


def _repaired(tokens: LLTokenizer, part: Part) -> Part:
    """Return a part whose JSON schema compiles. Raises ValueError with the path of what does not."""
    schema = json.loads(part.text) if part.kind == "json" else None
    if not isinstance(schema, dict) or not _schema_error(tokens, schema):
        return part
    return replace(part, text=json.dumps(_Repair(tokens, schema).run(), ensure_ascii=False))


def _schema_error(tokens: LLTokenizer, schema: _Schema) -> str:
    """Return why a schema does not compile; empty: it does."""
    try:
        matcher_of(tokens, LLMatcher.grammar_from_json_schema(schema, _WHITE_SPACE))
    except ValueError as error:
        return str(error)
    return ""


def _converted(part: Part) -> dict[str, Any]:
    """Convert a part to llguidance's form. Raises ValueError."""
    if part.kind == "json":
        schema = json.loads(part.text)
        if isinstance(schema, dict):
            # llguidance's own options: one of them ignores the keywords that it cannot compile.
            schema.pop("x-guidance", None)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), _WHITE_SPACE)
    elif part.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(part.text)
    else:
        try:
            text = any_to_lark(part.text) if part.kind == "grammar" else part.text
        except Exception as error:
            raise ValueError(f"neither Lark nor GBNF: {error}") from error
        return {"name": part.name, "lark_grammar": text}
    (converted,) = json.loads(grammar)["grammars"]
    return dict(converted) | {"name": part.name}


class _Repair:
    """One schema, changed until it compiles; llguidance names an error's reason, not its place.

    An alternative of `anyOf` that cannot be compiled is left out, which only narrows the answer. Formats that
    llguidance does not know are annotations. The rest is refused.

    Args:
        tokens: The tokens of its answers.
        schema: The schema; changed.
    """

    def __init__(self, tokens: LLTokenizer, schema: _Schema) -> None:
        self._tokens, self._schema = tokens, schema
        self._targets: dict[str, tuple[str, _Schema]] = {}  # of each reference, with its place
        schema.pop("$id", None)
        self._prepare(schema)
        named = {key: schema.pop(key, {}) for key in _DEFINITIONS}
        # With these, each part can be compiled alone.
        targets = {pointer[len(_TARGETS) :]: each for pointer, (_, each) in self._targets.items()}
        self._definitions = {"$defs": targets, "definitions": named}

    def run(self) -> _Schema:
        """Return a schema that compiles. Raises ValueError with the path of what cannot be compiled."""
        while reason := self._reason(self._schema):
            if not self._narrow(self._schema, "", True, frozenset()):
                raise ValueError(reason)
        return self._schema | self._definitions

    def _prepare(self, node: _Schema) -> None:
        """Remove what allows everything; let references lead to the places where `_reason` puts targets."""
        for key, value in _NEUTRAL:
            if node.get(key, ...) == value:
                del node[key]
        if "format" in node and _schema_error(
            self._tokens, {"type": "string", "format": node["format"]}
        ):
            del node["format"]
        steps = unquote(str(node.get("$ref"))).split("/")
        target = _found(self._schema, steps[1:]) if steps[0] == "#" else None
        if target is not None:
            places = {place: pointer for pointer, (place, _) in self._targets.items()}
            place = ".".join(steps[1:])
            node["$ref"] = places.get(place, f"{_TARGETS}{len(places)}")
            self._targets[node["$ref"]] = (place, target)
        for _, _, inner in _parts(node):
            self._prepare(inner)

    def _narrow(self, node: _Schema, path: str, narrows: bool, within: frozenset[int]) -> bool:
        """Remove alternatives that keep a schema from compiling; return whether there was one.

        Args:
            node: The schema.
            path: Its place, for errors.
            narrows: Whether it may be narrowed: not in `oneOf`, where a value then fits another alternative.
            within: The schemas that contain it, to which a reference may lead back.
        """
        reason = self._reason(node)
        if not reason or id(node) in within:
            return False
        parts = [(key, f"{path}.{place}", inner) for key, place, inner in _parts(node)]
        if target := self._targets.get(str(node.get("$ref"))):
            parts.append(("$ref", *target))
        parts = [part for part in parts if self._reason(part[2])]
        if not parts:
            raise ValueError(f"{path.removeprefix('.')}: {reason}" if path else reason)
        changed, wrong = False, list[_Schema]()
        for key, place, inner in parts:
            # A discriminator tells the alternatives apart in any case.
            may = narrows and (key != "oneOf" or "discriminator" in node)
            try:
                changed |= self._narrow(inner, place, may, within | {id(node)})
            except ValueError:
                wrong.append(inner)
                if not may or key != "anyOf" or len(wrong) == len(node[key]):
                    raise
        if wrong:
            node["anyOf"] = [each for each in node["anyOf"] if all(each is not w for w in wrong)]
        return changed or bool(wrong)

    def _reason(self, node: _Schema) -> str:
        lines = _schema_error(self._tokens, node | self._definitions).splitlines() or [""]
        # Of an error in a regular expression, a later line has the reason.
        line = next((each for each in lines if each.startswith("error: ")), lines[0])
        return line.removeprefix("error: ").replace(*_ONE_OF_REMEDY)


def _parts(node: _Schema) -> Iterator[tuple[str, str, _Schema]]:
    """Yield the schemas in a schema: the keyword, the place, the schema."""
    for key, value in node.items():
        found: list[tuple[str, Any]] = []
        if key in _BY_NAME and isinstance(value, dict):
            found = [(f"{key}.{name}", each) for name, each in value.items()]
        elif key in _ONE_OR_LIST and isinstance(value, list):
            found = [(f"{key}[{index}]", each) for index, each in enumerate(value)]
        elif key in _ONE_OR_LIST:
            found = [(key, value)]
        yield from ((key, place, each) for place, each in found if isinstance(each, dict))


def _found(node: Any, steps: list[str]) -> _Schema | None:
    """Return the schema at a JSON pointer; None: there is none."""
    try:
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[int(step) if isinstance(node, list) else step]
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    return node if isinstance(node, dict) else None


if __name__ == "__main__":
    main()

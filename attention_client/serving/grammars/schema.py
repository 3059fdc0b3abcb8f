"""JSON schemas that llguidance cannot compile as they are: it names an error's reason, not its place.

An alternative of `anyOf` that cannot be compiled is left out, which only narrows the answer. Formats that
llguidance does not know are annotations. The rest is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["Repair"]

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


class Repair:
    """One schema, changed until it compiles.

    Args:
        schema: The schema; changed.
        error: Returns why a schema does not compile; empty: it does.
    """

    def __init__(self, schema: _Schema, error: Callable[[_Schema], str]) -> None:
        self._schema = schema
        self._error = error
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
        if "format" in node and self._error({"type": "string", "format": node["format"]}):
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
        lines = self._error(node | self._definitions).splitlines() or [""]
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

"""JSON schemas that llguidance cannot compile as they are: it names an error's reason, not its place.

An alternative of `anyOf` that cannot be compiled is left out, which only narrows the answer. Formats that
llguidance does not know are annotations. The rest is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

__all__ = ["Repair"]

_Pointer = tuple[str | int, ...]

_ROOT: _Pointer = ("$defs", "root")
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

    def __init__(self, schema: dict[str, Any], error: Callable[[dict[str, Any]], str]) -> None:
        self._error = error
        self._busy: set[_Pointer] = set()
        self._changed = False
        schema.pop("$id", None)
        # Below another root, each part can be compiled alone with the references that it has.
        self._document = {"$defs": {"root": schema}}
        _move_references(schema)

    def run(self) -> dict[str, Any]:
        """Return a schema that compiles. Raises ValueError with the path of what cannot be compiled."""
        while error := self._reason(_ROOT):
            self._changed = False
            self._repair(_ROOT)
            if not self._changed:
                raise ValueError(error)
        return self._document | {"$ref": _reference(_ROOT)}

    def _repair(self, at: _Pointer, narrows: bool = True) -> None:
        """Change what keeps a part from compiling, the innermost parts first.

        Args:
            at: The part.
            narrows: Whether it may be narrowed: not in `oneOf`, where a value then fits another alternative.
        """
        if at in self._busy or not self._reason(at):
            return
        self._busy.add(at)
        node = self._found(at)
        failing = [each for each in _parts(at, node) if self._reason(each[1])]
        wrong: list[_Pointer] = []
        for key, inner in failing:
            try:
                # A discriminator tells the alternatives apart in any case.
                self._repair(inner, narrows and (key != "oneOf" or "discriminator" in node))
            except ValueError:
                wrong.append(inner)
                if not narrows or key != "anyOf" or len(wrong) == len(node["anyOf"]):
                    raise
        for inner in reversed(wrong):
            del node["anyOf"][inner[-1]]
        if not failing and not self._clean(node):
            raise ValueError(f"{_path(at)}{self._reason(at)}")
        self._changed |= bool(wrong) or not failing
        self._busy.discard(at)

    def _clean(self, node: dict[str, Any]) -> bool:
        """Remove from a part what allows everything; return whether there was something."""
        unused = [key for key, value in _NEUTRAL if node.get(key, ...) == value]
        if "format" in node and self._error({"type": "string", "format": node["format"]}):
            unused.append("format")
        for key in unused:
            del node[key]
        return bool(unused)

    def _found(self, at: _Pointer) -> dict[str, Any]:
        node: Any = self._document
        try:
            for step in at:
                node = node[int(step) if isinstance(node, list) else step]
        except (KeyError, IndexError, ValueError, TypeError):
            node = None
        if isinstance(node, dict):
            return node
        raise ValueError(f"{_path(at)}there is no such schema")

    def _reason(self, at: _Pointer) -> str:
        lines = self._error(self._document | {"$ref": _reference(at)}).splitlines() or [""]
        # Of an error in a regular expression, a later line has the reason.
        line = next((each for each in lines if each.startswith("error: ")), lines[0])
        return line.removeprefix("error: ").replace(*_ONE_OF_REMEDY)


def _schemas(node: dict[str, Any]) -> Iterator[tuple[_Pointer, dict[str, Any]]]:
    """Yield the schemas in a schema, each with the steps to it."""
    for key, value in node.items():
        found: Any = ()
        if key in _BY_NAME and isinstance(value, dict):
            found = [((key, name), each) for name, each in value.items()]
        elif key in _ONE_OR_LIST and isinstance(value, list):
            found = [((key, index), each) for index, each in enumerate(value)]
        elif key in _ONE_OR_LIST:
            found = [((key,), value)]
        yield from (each for each in found if isinstance(each[1], dict))


def _parts(at: _Pointer, node: dict[str, Any]) -> Iterator[tuple[str, _Pointer]]:
    """Yield the places of the schemas on which a schema depends, each with its keyword."""
    if str(node.get("$ref", "")).startswith("#/"):
        yield "$ref", _target(node)
    for steps, _ in _schemas(node):
        if steps[0] not in _DEFINITIONS:
            yield str(steps[0]), at + steps


def _move_references(schema: dict[str, Any]) -> None:
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        schema["$ref"] = _reference(_ROOT + (_target(schema) if target != "#" else ()))
    for _, inner in _schemas(schema):
        _move_references(inner)


def _reference(at: _Pointer) -> str:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in at)
    return "#" + "".join(f"/{quote(step)}" for step in steps)


def _target(node: dict[str, Any]) -> _Pointer:
    steps = unquote(str(node["$ref"]).removeprefix("#/")).split("/")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


def _path(at: _Pointer) -> str:
    path = ""
    for step in at[len(_ROOT) :]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return f"{path}: " if path else ""

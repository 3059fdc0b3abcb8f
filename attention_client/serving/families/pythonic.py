"""Calls that a model writes as Python does, one a line: `get_weather(city="Paris", days=3)` (OLMo 3)."""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["pythonic"]

_JSON_NAMES = {"true": True, "false": False, "null": None}


def pythonic(text: str, _options: dict[str, Any]) -> list[dict[str, Any]]:
    """Parse calls with keyword arguments, whose values are literals of Python or of JSON.

    A parser of contents, as transformers' response templates name them.

    Returns:
        {"name": ..., "arguments": {...}} of each call.

    Raises:
        ValueError: The text is something else.
    """
    try:
        return [_call(each) for each in ast.parse(text.strip()).body]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        # TypeError: a list as a key of an object. The last two: nested too deeply.
        raise ValueError(f"no calls: {error}") from error


def _call(node: ast.stmt) -> dict[str, Any]:
    match node:
        case ast.Expr(ast.Call(func=name, args=[], keywords=keywords)):
            arguments = {each.arg: _value(each.value) for each in keywords}
            if None not in arguments:  # **
                return {"name": ast.unparse(name), "arguments": arguments}
    raise ValueError("no call with keyword arguments")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(items):
            return [_value(each) for each in items]
        case ast.Dict(keys, values):
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True)}  # type: ignore[arg-type]
        case ast.Constant(str(string)):
            # JSON writes a character beyond the 16-bit range as two halves.
            return string.encode("utf-16", "surrogatepass").decode("utf-16")
    return ast.literal_eval(node)

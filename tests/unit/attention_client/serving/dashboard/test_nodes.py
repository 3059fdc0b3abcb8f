"""Elements have allowed tags and attributes only, and text is never parsed."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import attention_client.serving.dashboard
from attention_client.serving.dashboard.nodes import encode, h

PACKAGE = Path(attention_client.serving.dashboard.__file__).parent
# These methods parse their argument as properties, markup, styles or a script.
PARSING = {
    "add_body_html",
    "add_css",
    "add_head_html",
    "add_slot",
    "classes",
    "html",
    "markdown",
    "props",
    "run_javascript",
    "style",
}


@pytest.mark.parametrize(
    "evil", ["<img src=x onerror=go()>", '" :href=go() ', "{{go()}}", "\\`${", "\n"]
)
def test_text_and_values_are_unchanged(evil: str) -> None:
    drawn = encode(h("td", evil, h("bdi", evil), title=evil, class_=evil), evil)
    cell = ["td", {"title": evil, "class": evil}, [evil, ["bdi", {}, [evil]]]]
    assert json.loads(drawn) == [cell, evil]


@pytest.mark.parametrize("tag", ["script", "iframe", "style", "object", "form", "q-btn", "base"])
def test_other_elements_are_refused(tag: str) -> None:
    with pytest.raises(ValueError, match=f"not drawn here: <{tag}>"):
        h(tag)


@pytest.mark.parametrize("name", ["onclick", "innerHTML", "style", "srcdoc", ":href", "v_html"])
def test_other_attributes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not drawn here"):
        h("a", **{name: "x"})


@pytest.mark.parametrize(
    ("tag", "name", "address"),
    [
        ("a", "href", "javascript:go()"),
        ("a", "href", "//elsewhere/"),
        ("img", "src", "http://elsewhere/"),
        ("img", "src", "data:image/svg+xml,x"),
    ],
)
def test_addresses_of_other_sites_are_refused(tag: str, name: str, address: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not begin with"):
        h(tag, **{name: address})


def parsed_texts(source: str) -> list[str]:
    """Calls of these methods with an argument that is not a literal."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in PARSING
        and not all(
            isinstance(value, ast.Constant)
            for value in (*call.args, *(keyword.value for keyword in call.keywords))
        )
    ]


def test_row_41_nothing_that_is_not_written_out_is_ever_parsed() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    assert {f.name: parsed_texts(f.read_text()) for f in files} == {f.name: [] for f in files}


@pytest.mark.parametrize(
    "line",
    [
        "e.props(f'aria-label=\"{name}\"')",
        "e.classes('card ' + size)",
        "ui.html(escape(name), sanitize=False)",
        "ui.run_javascript(code=name)",
        "e.props(*names)",
        "e.style('width: %s' % name)",
    ],
)
def test_the_check_above_finds(line: str) -> None:
    assert parsed_texts(line) == [line]
    assert parsed_texts("e.props('role=\"alert\"').classes('card')") == []

"""Every error that docs/faq.md quotes is in the code, word for word except for `...`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "faq.md"
PACKAGES = (
    "eaas",
    "eaas_cli",
    "frontend",
    "attention_client",
    "expert_server",
    "monitor",
    "balancer",
)
_CELL = re.compile(r"^\| (`.*?) \| ", re.MULTILINE)
_QUOTE = re.compile(r"`([^`]+)`")
# The place of a value in a string of the code.
_VALUE = "\0"


def quotes() -> list[str]:
    return [quote for cell in _CELL.findall(PAGE.read_text()) for quote in _QUOTE.findall(cell)]


def strings(tree: ast.AST) -> Iterator[str]:
    """String constants of the code without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _VALUE
                for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


@pytest.fixture(scope="module")
def said() -> list[str]:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    files.append(ROOT / "deploy/install.py")
    trees = [ast.parse(file.read_text()) for file in files]
    return [text for tree in trees for text in strings(tree)] + [(ROOT / "Makefile").read_text()]


def stands(quote: str, said: list[str]) -> bool:
    """Whether a string contains the quote's parts between `...`, in order."""
    fragments = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quote)]
    pattern = re.compile(r"[^\n]*?".join(fragments))
    return any(pattern.search(text) for text in said)


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_error_is_in_the_code(quote: str, said: list[str]) -> None:
    assert len(quote.replace("...", "").strip(" :;.,")) >= 10, "too short to mean one error"
    assert stands(quote, said), f"no string of the code is {quote!r}"

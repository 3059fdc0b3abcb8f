"""The size and the structure of the packages, against `[tool.eaas]` of pyproject.toml."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from eaas import transports
from eaas.config.settings import ClusterConfig
from eaas_cli.commands import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RULES = PROJECT["tool"]["eaas"]
# Text that people write and read. Data, and what a tool writes, does not count.
SUFFIXES = {".py", ".pyi", ".c", ".h", ".js", ".css", ".html", ".jinja"}
# Files of others, unchanged. A NOTICE beside them names each with its source, its license and its SHA-256.
VENDORED = "vendor"
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
MOST_LINES = 70
# The log has names of its day.
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "performance.md"]


def texts_of(folder: str) -> list[Path]:
    """Written files of a folder."""
    return [
        path
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
        and not GENERATED.search(path.name)
        and path.parent.name != VENDORED
    ]


def name_of(path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGES = [name for name in RULES["budgets"] if name != "tests"]
TREES = {
    name_of(path): ast.parse(path.read_text())
    for package in PACKAGES
    for path in texts_of(package)
    if path.suffix in (".py", ".pyi")
}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that a tree imports, also for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in TREES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in TREES:
                    yield inner
                elif node.module in TREES:
                    yield node.module


def started_by_name(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that a tree names, to start them in another process or to load them late."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in re.findall(r"\w+(?:\.\w+)+", node.value):
                # Also a class or function of a module.
                yield from {word, word.rpartition(".")[0]} & TREES.keys()


def circles(edges: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of modules, each of which imports itself over the others of its group."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(edges[name])
        return found

    reach = {name: reached(name) for name in edges}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in edges
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def long_functions() -> Iterator[str]:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MOST_LINES:
                    yield f"{module}:{node.name}"


def settings_of(model: type[BaseModel], place: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings_of(inner, f"{place}{name}.")
        else:
            yield f"{place}{name}"


def commands_of(command: Any, words: tuple[str, ...] = ("eaas",)) -> Iterator[str]:
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if not inner:
        yield " ".join(words)
    for name, each in inner.items():
        if not each.hidden:
            yield from commands_of(each, (*words, name))


def metrics_of(trees: Iterable[ast.AST]) -> set[str]:
    """Names of metrics, of modules that import prometheus_client; counters without `_total`."""
    return {
        node.value
        for tree in trees
        if "prometheus_client" in ast.unparse(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"eaas_[a-z0-9_]*[a-z0-9]", node.value)
    }


@pytest.mark.parametrize("folder", list(RULES["budgets"]))
def test_a_package_stays_in_its_budget(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in texts_of(folder))
    assert lines <= RULES["budgets"][folder]


def test_vendored_files_are_those_of_their_notice() -> None:
    folders = [path for package in PACKAGES for path in (ROOT / package).rglob(VENDORED)]
    assert folders
    for folder in folders:
        named = re.findall(r"^(\w{64})  (\S+)$", (folder / "NOTICE").read_text(), re.MULTILINE)
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "NOTICE"}
        assert {name: digest for digest, name in named} == {
            name: hashlib.sha256(content).hexdigest() for name, content in found.items()
        }


def test_a_function_fits_on_a_screen() -> None:
    # Equal, so that the list shrinks with the code.
    assert sorted(long_functions()) == sorted(RULES["long-functions"])


def test_modules_import_one_another_in_no_circle() -> None:
    edges = {name: set(imports_of(tree)) - {name} for name, tree in TREES.items()}
    assert circles(edges) == sorted(sorted(group) for group in RULES["circles"])


def test_every_module_has_a_user_other_than_tests() -> None:
    entries = {
        value.partition(":")[0]
        for group in (
            PROJECT["project"]["scripts"],
            *PROJECT["project"].get("entry-points", {}).values(),
        )
        for value in group.values()
    }
    ends = [transports.known(name) for name in transports.names()]
    entries |= {place.partition(":")[0] for end in ends for place in (end.client, end.server)}
    used = set(entries)
    for name, tree in TREES.items():
        used |= {other for other in (*imports_of(tree), *started_by_name(tree)) if other != name}
    # A package is used with any of its modules.
    used |= {parent for name in used for parent in parents(name)}
    assert [
        name
        for name in TREES
        if name not in used and not name.endswith("__main__") and not is_program(name)
    ] == []


def parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def is_program(name: str) -> bool:
    """Whether a user starts the module: `python -m`."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in TREES[name].body
    )


@pytest.mark.parametrize("kind", ["settings", "commands", "metrics"])
def test_a_page_explains_what_users_meet(kind: str) -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    names: dict[str, Iterable[str]] = {
        "settings": settings_of(ClusterConfig),
        "commands": commands_of(typer.main.get_command(app)),
        "metrics": metrics_of(TREES.values()),
    }
    assert [
        name
        for name in names[kind]
        if not re.search(rf"(?<![\w.]){re.escape(name)}(_total)?\b", pages)
    ] == []

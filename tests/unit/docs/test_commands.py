"""Every `eaas ...` command of the documents exists, with its options."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from eaas_cli.commands import app

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    # The log may name commands of its day.
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "performance.md"),
    *sorted((ROOT / "examples").rglob("*.md")),
]
PROGRAM = typer.main.get_command(app)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:\.venv/bin/)?eaas [^`\n]+)`")
_ENDS = {"&&", "||", "|", ";", "&", ">"}
# The rest of a command, or any command of a group.
_REST = "..."
# What stands for a value in the documents.
_GIVEN = {"N": "7", "SEED": "7", "HOST:PORT": "h:1"}


def lines_of(text: str) -> list[str]:
    """Shell lines of fenced blocks; continued lines are joined."""
    shell = [block for language, block in _FENCE.findall(text) if language in ("", "bash", "sh")]
    blocks = "".join(shell).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if re.search(r"(^|[\s/(])eaas ", line)]


def words_of(line: str) -> list[list[str]]:
    """The words after each `eaas` of a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return []  # not shell: an open quote
    found: list[list[str]] = []
    inside = False
    for before, token in zip(["", *tokens], tokens, strict=False):
        if not inside and Path(token).name == "eaas" and not before.startswith("-"):
            found.append([])
            inside = True
        elif inside and (token in _ENDS or set(token) <= set("&|;()<>")):
            inside = False
        elif inside:
            found[-1].append(token)
    return [words for words in found if words]


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command, and its remaining words. Raises LookupError if it does not exist."""
    command: Any = PROGRAM
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] == _REST:
            return command, []
        if words[0] not in command.commands:
            raise LookupError(f"there is no command {words[0]!r} in {sorted(command.commands)}")
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_options(words: list[str]) -> None:
    """Check the options of a command in a sentence, which may be incomplete."""
    command, rest = find(words)
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{' '.join(words)}: no option {word}"


def check_whole(words: list[str]) -> None:
    """Check that a command to type parses."""
    command, rest = find(words)
    assert not hasattr(command, "commands") or "--help" in rest, f"{words}: which command?"
    if _REST in rest:
        return check_options(words)
    given = [_GIVEN.get(word, word) for word in rest]
    command.make_context("eaas", given).close()
    return None


CASES = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}")
    for page in PAGES
    for line in lines_of(page.read_text())
    for words in words_of(line)
]
MENTIONS = sorted(
    {
        (page.name, mention)
        for page in PAGES
        for mention in _INLINE.findall(_FENCE.sub("", page.read_text()))
    }
)


@pytest.mark.parametrize("words", CASES)
def test_a_command_to_type_parses(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Several clusters may run here meanwhile.
    monkeypatch.setenv("EAAS_ENDPOINT", "http://127.0.0.1:8000")
    check_whole(words)


@pytest.mark.parametrize(("page", "mention"), MENTIONS)
def test_a_mentioned_command_exists(page: str, mention: str) -> None:
    for words in words_of(mention):
        check_options(words)

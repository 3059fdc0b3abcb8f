"""Validation of a checkpoint's chat templates, without transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.text_files import REPAIR, read_text
from eaas.errors import CheckpointError

__all__ = ["DEFAULT", "check_templates", "no_default"]

DEFAULT = "default"
"""Name of the template that chats use."""

_LOG = logging.getLogger(__name__)
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"


def no_default(names: list[str]) -> str:
    """Say that chat templates have these names, none of which is the default, and what to do."""
    shown = ", ".join(repr(name) for name in names)
    return (
        f"This model's chat templates are named {shown}, and none of them 'default'. "
        "Use /v1/completions instead."
    )


def check_templates(source: LocalSource, settings_place: str, settings: Any) -> None:
    """Check that jinja2 reads the chat templates.

    Args:
        source: Where the checkpoint's files are.
        settings_place: Names tokenizer_config.json in messages.
        settings: Its field `chat_template`, which counts if there are no files with templates.

    Raises:
        CheckpointError: The field has another form; a template has a syntax error.
        OSError: A file cannot be read.
    """
    templates = dict(_files(source)) or dict(_fields(settings_place, settings))
    for place, (_, text) in templates.items():
        _parse(place, text)
    names = [name for name, _ in templates.values()]
    if names and DEFAULT not in names:
        _LOG.warning("%s: %s", source, no_default(names))


def _files(source: LocalSource) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield place -> (name, text) of each file with a template; transformers prefers them to the field."""
    named = {_FILE: DEFAULT}
    for path in sorted((source.directory / _FOLDER).glob("*.jinja")):
        named[f"{_FOLDER}/{path.name}"] = path.stem
    for file, name in named.items():
        text = read_text(source, file)
        if text is not None:
            yield source.place(file), (name, text)


def _fields(place: str, settings: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    if isinstance(settings, list):
        for number, entry in enumerate(settings):
            entry = entry if isinstance(entry, dict) else {}
            name, text = entry.get("name"), entry.get("template")
            if not isinstance(name, str) or not isinstance(text, str):
                raise CheckpointError(
                    f'{place}: chat_template: entry {number} has no "name" and "template": {REPAIR}'
                )
            yield f"{place}: chat_template {name!r}", (name, text)
    elif isinstance(settings, dict):
        yield from _fields(place, [{"name": n, "template": t} for n, t in settings.items()])
    elif settings is not None:
        yield f"{place}: chat_template", (DEFAULT, settings)


def _parse(place: str, text: str) -> None:
    # transformers reads templates with these extensions, and its own.
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, which marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    try:
        environment.compile(text)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"{place}: line {error.lineno}: {(error.message or '').rstrip('.')}: {REPAIR}"
        ) from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{place}: the template is nested too deeply ({type(error).__name__}): {REPAIR}"
        ) from error

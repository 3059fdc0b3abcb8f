"""Make examples/cluster.yaml from the settings' classes: python docs/make_settings.py"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from eaas.config.settings import ClusterConfig

PAGE = Path(__file__).parents[1] / "examples" / "cluster.yaml"
HEAD = """\
# Settings of a cluster: every section and field with its default. Made by docs/make_settings.py.
#
#   eaas up --model DIR --config examples/cluster.yaml
#
# A section is a role. Leave out what you do not change; unknown sections and fields are errors.
# Each field has an environment variable, EAAS_<SECTION>__<FIELD>, for example
# EAAS_EXPERT_SERVER__THREADS=2. Precedence: command line, environment, this file, default.
#
# `eaas up` passes these as options, so their lines here have no effect with it:
# balancer.expected_servers (--servers), balancer.redundancy (--redundancy),
# monitor.stop_members_on_exit (always true).
"""
_WIDTH = 100


def listing() -> str:
    """The file's text."""
    return "\n".join([HEAD, *_section(ClusterConfig, "")])


def _section(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _comment(field.description or _first_line(inner), indent)
            yield f"{indent}{name}:"
            yield from _section(inner, f"{indent}  ")
            if not indent:
                yield ""
        else:
            yield from _comment(field.description, indent)
            yield f"{indent}{name}: {_value(field.get_default(call_default_factory=True))}"


def _first_line(model: type[BaseModel]) -> str | None:
    return model.__doc__ and model.__doc__.splitlines()[0]


def _comment(text: str | None, indent: str) -> Iterator[str]:
    assert text, "a setting without a description"
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _value(value: Any) -> str:
    """A default as YAML, on one line."""
    if isinstance(value, str):
        return value if value and yaml.safe_load(value) == value else f'"{value}"'
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(listing())

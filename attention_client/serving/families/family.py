"""Families of models that write answers alike, and the choice of one for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
from transformers.utils.chat_parsing.response_templates import load_response_template

from attention_client.serving.families.calls import CallFormat, pythonic
from eaas.errors import ConfigError

__all__ = ["Family"]

CONTENT_PARSERS["pythonic"] = pythonic

_FORM = "a JSON object with response_template and, optionally, needs, call, call_id and content"


@dataclass(frozen=True)
class Family:
    """How the models of one family write an answer.

    Attributes:
        name: Name of its file, or of the checkpoint's own template.
        template: transformers' response template.
        needs: Texts of which each is an added token of the family's tokenizers, or in their chat templates.
        call: Format of forced calls; None: it holds no JSON.
        call_id: Form of the ids of calls, with {name} and {index}; None: any.
        content: What the model writes before the text of an answer.
    """

    name: str
    template: dict[str, Any]
    needs: Sequence[str] = ()
    call: CallFormat | None = None
    call_id: str | None = None
    content: str = ""

    @classmethod
    def of(cls, tokenizer: Any, named: str | None = None) -> Family | None:
        """Choose the family of a tokenizer; None: none fits, so answers are text.

        A template in tokenizer_config.json (`response_template`) decides; else the family with the most needs
        that the tokenizer meets; of two, the one that calls tools.

        Args:
            tokenizer: A transformers tokenizer.
            named: A family's name or the path of a file, which decides instead.

        Raises:
            ConfigError: There is no such family or file, or the file is invalid.
        """
        if named is not None:
            return cls.named(named)
        own = getattr(tokenizer, "response_template", None)
        if own is not None:
            return cls._of({"response_template": own}, "tokenizer_config.json")
        templates = tokenizer.chat_template or ""
        shown = templates if isinstance(templates, str) else "".join(templates.values())
        shown += "\n".join(added.content for added in tokenizer.added_tokens_decoder.values())
        fitting = [each for each in _families() if all(text in shown for text in each.needs)]
        return max(
            fitting,
            key=lambda each: (len(each.needs), "tool_calls" in each.template["fields"]),
            default=None,
        )

    @classmethod
    def named(cls, named: str) -> Family:
        """Return the family with a name, or of a file. Raises ConfigError."""
        names = {family.name: family for family in _families()}
        if named in names:
            return names[named]
        path = Path(named)
        if not path.is_file():
            raise ConfigError(
                f"response_template: no family {named!r} and no such file; the families are "
                f"{', '.join(sorted(names))}"
            )
        try:
            return cls._of(json.loads(path.read_text()), str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"response_template: {path} cannot be read: {error}") from error

    @classmethod
    def _of(cls, fields: Any, name: str) -> Self:
        try:
            options = dict(fields)
            load_response_template(template := options.pop("response_template"))
            if options.get("call") is not None:
                options["call"] = CallFormat(**options["call"])
            return cls(name, template, **options)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"response_template: {name} is not {_FORM}: {error}") from error


@cache
def _families() -> tuple[Family, ...]:
    files = (each for each in resources.files(__package__).iterdir() if each.name.endswith(".json"))
    return tuple(
        Family._of(json.loads(file.read_text()), file.name.removesuffix(".json")) for file in files
    )

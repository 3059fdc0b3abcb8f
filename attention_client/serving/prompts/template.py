"""Applies a tokenizer's chat template; every failure of its code becomes an answer with status 400."""

from __future__ import annotations

from typing import Any

import jinja2

from eaas.checkpoint.chat_templates import DEFAULT, no_default
from eaas.generation.errors import ApiError

__all__ = ["missing_template", "render"]


def missing_template(tokenizer: Any, *, tools: bool = False) -> str:
    """Say why a tokenizer has no template for chats, with tools or without; empty if it has one."""
    template = tokenizer.chat_template
    if not template:
        return "This model has no chat template. Use /v1/completions instead."
    usable = {DEFAULT, "tool_use"} if tools else {DEFAULT}
    if isinstance(template, dict) and not usable & template.keys():
        return no_default(list(template))
    return ""


def render(tokenizer: Any, field: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """Make the text of a prompt.

    Args:
        tokenizer: A transformers tokenizer.
        field: The request's field with the messages.
        messages: The messages, in the form of chat templates.
        arguments: Of `render_jinja_template`, and the template's variables.

    Raises ApiError (400): the template refuses the messages, or its code fails.
    """
    # The prompt worker hides torch before transformers is imported.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Not `apply_chat_template`: it drops a content of None, for which some templates ask.
        (text,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=tokenizer.get_chat_template(tools=arguments.get("tools")),
            **tokenizer.special_tokens_map | arguments,
        )
        # No tokenizer takes half of a surrogate pair, which a template may have as an escape.
        text.encode()
        return str(text)
    except Exception as error:  # whatever the template's code raises
        # With TemplateError itself, templates refuse orders of roles that they do not support.
        refuses = type(error) is jinja2.TemplateError or isinstance(error, ValueError)
        if refuses and not isinstance(error, UnicodeError):
            reason = f"The model's chat template refuses these messages: {error}"
        else:
            reason = f"The model's chat template fails on these messages: {type(error).__name__}: {error}"
        raise ApiError.invalid(field, reason) from error

"""Loads whose prompts are of a few domains, in bursts of one domain each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eaas.bench.load import Workload
from eaas.errors import ConfigError

__all__ = ["DomainWorkload", "TextWorkload", "check_texts"]

# Domains that are drawn, and tokens of each.
_DOMAINS, _DOMAIN_TOKENS = 8, 6
# A text has as many times a prompt's tokens at least, or there would be hardly a choice of prompts.
_LEAST_TEXT = 2


@dataclass(frozen=True)
class DomainWorkload(Workload):
    """Prompts of domains that are drawn: a few tokens each.

    Attributes:
        burst: Requests in a row of one domain.
        first: Number of the first prompt: no two numbers have the same one.
    """

    burst: int
    first: int = 0

    def prompt(self, index: int) -> list[int]:
        """Tokens of its domain, each as frequent as words are (Zipf)."""
        number = self.first + index
        domain = np.random.default_rng(number // self.burst % _DOMAINS)
        tokens = domain.choice(np.arange(16, 250), _DOMAIN_TOKENS, replace=False)
        chance = 1 / np.arange(1, _DOMAIN_TOKENS + 1)
        own = np.random.default_rng([number, self.burst])
        drawn = own.choice(tokens, self.prompt_tokens, p=chance / chance.sum())
        return [int(token) for token in drawn]


@dataclass(frozen=True)
class TextWorkload(DomainWorkload):
    """Prompts out of texts, one text for each domain.

    Attributes:
        texts: Tokens of each.
    """

    texts: Sequence[Sequence[int]] = ()

    def prompt(self, index: int) -> list[int]:
        """So many tokens in a row, from anywhere in the text, whose end goes on at its beginning."""
        number = self.first + index
        text = np.asarray(self.texts[number // self.burst % len(self.texts)])
        begin = int(np.random.default_rng([number, self.burst]).integers(len(text)))
        taken = np.take(text, np.arange(begin, begin + self.prompt_tokens), mode="wrap")
        return [int(token) for token in taken]


def check_texts(texts: Sequence[tuple[str, Sequence[int]]], prompt_tokens: int) -> None:
    """Raises ConfigError, by name, for a text that is too short for such prompts."""
    for name, tokens in texts:
        if len(tokens) < _LEAST_TEXT * prompt_tokens:
            raise ConfigError(
                f"--prompts {name}: {len(tokens)} tokens, and prompts of {prompt_tokens} take "
                f"{_LEAST_TEXT * prompt_tokens} at least: give a longer text, or fewer --prompt-tokens"
            )

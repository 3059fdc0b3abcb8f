"""Loads with prompts of a few domains, in bursts of one domain each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eaas.errors import ConfigError
from eaas_cli.bench.load import Workload

__all__ = ["DomainWorkload", "TextWorkload", "check_texts"]

# Synthetic domains, and tokens of each.
_DOMAINS, _DOMAIN_TOKENS = 8, 6
# Least length of a text, in prompts.
_LEAST_TEXT = 2


@dataclass(frozen=True)
class DomainWorkload(Workload):
    """Prompts of synthetic domains with a few tokens each.

    Attributes:
        burst: Consecutive requests of one domain.
        first: Number of the first prompt; prompts differ by number.
    """

    burst: int
    first: int = 0

    def prompt(self, index: int) -> list[int]:
        """Tokens of the domain, Zipf-distributed."""
        number = self.first + index
        domain = np.random.default_rng(number // self.burst % _DOMAINS)
        tokens = domain.choice(np.arange(16, 250), _DOMAIN_TOKENS, replace=False)
        chance = 1 / np.arange(1, _DOMAIN_TOKENS + 1)
        own = np.random.default_rng([number, self.burst])
        drawn = own.choice(tokens, self.prompt_tokens, p=chance / chance.sum())
        return [int(token) for token in drawn]


@dataclass(frozen=True)
class TextWorkload(DomainWorkload):
    """Prompts from texts, one text per domain.

    Attributes:
        texts: Tokens of each text.
    """

    texts: Sequence[Sequence[int]] = ()

    def prompt(self, index: int) -> list[int]:
        """Consecutive tokens from a random place of the text, which wraps around."""
        number = self.first + index
        text = np.asarray(self.texts[number // self.burst % len(self.texts)])
        begin = int(np.random.default_rng([number, self.burst]).integers(len(text)))
        taken = np.take(text, np.arange(begin, begin + self.prompt_tokens), mode="wrap")
        return [int(token) for token in taken]


def check_texts(texts: Sequence[tuple[str, Sequence[int]]], prompt_tokens: int) -> None:
    """Raise ConfigError for a text that is too short for the prompts."""
    for name, tokens in texts:
        if len(tokens) < _LEAST_TEXT * prompt_tokens:
            raise ConfigError(
                f"--prompts {name}: {len(tokens)} tokens, and prompts of {prompt_tokens} need "
                f"at least {_LEAST_TEXT * prompt_tokens}: give a longer text, or fewer --prompt-tokens"
            )

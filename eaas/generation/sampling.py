"""A request's settings of how its tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eaas.generation.grammar import Grammar

__all__ = ["GREEDY", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request, from its body or the model's defaults.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus sampling: the smallest set of tokens with this probability; 1: all tokens.
        top_k: The k likeliest tokens; 0: all tokens.
        min_p: Tokens with this fraction of the likeliest token's probability; 0: all tokens.
        seed: Seed of the random draws.
        min_tokens: The first tokens of the answer, which are no end tokens and in which no stop string
            matches.
        end_tokens: The tokens that `min_tokens` delays, and that a grammar may end with.
        presence_penalty: Subtracted from the logit of each token that was generated.
        frequency_penalty: Subtracted once for each time that a token was generated.
        repetition_penalty: Divides the positive logit of each token of prompt and answer, and multiplies a
            negative one.
        logit_bias: Tokens, and what is added to their logits.
        logprobs: Report the log-probability of each chosen token and of this many likeliest tokens; None: no
            report.
        prompt_logprobs: Report them for the tokens of the prompt, too.
        grammar: What the answer must follow; None: any text.
        allowed_tokens: The tokens that the answer may have; a grammar may end it in any case. None: all.
        bad_words: Sequences of tokens that the answer must not have.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    allowed_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether each token is the argmax of the logits, and nothing is reported."""
        return (
            self.temperature == 0
            and not self.min_tokens
            and not self.has_penalties
            and not self.logit_bias
            and self.logprobs is None
            and self.grammar is None
            and self.allowed_tokens is None
            and not self.bad_words
        )


GREEDY = Sampling()

"""The settings of a request's sequences: the fields of its body, or the model's defaults for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention_client.serving.defaults import Defaults
from attention_client.serving.prompts.bodies import CompletionRequest, GenerationRequest
from eaas.generation.errors import ApiError
from eaas.generation.grammar import Grammar
from eaas.generation.sampling import Sampling

__all__ = ["check_size", "sampling_of"]

_GREEDY_BELOW = 1e-5  # temperature; scores divided by less overflow
_MOST_PROMPT_TOKENS = 2**20  # of one request, each prompt counted once for each of its choices
_MOST_LOGPROBS = 2**20  # of one request
_CUTS = {"top_p", "top_k", "min_p"}
_SAME_NAMES = _CUTS | {
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
}


def check_size(
    request: GenerationRequest, lengths: list[int], budgets: list[int], most: int
) -> None:
    """Refuse too many sequences, prompt tokens or log-probabilities. Raises ApiError (400).

    Args:
        request: The request.
        lengths: Tokens of each prompt.
        budgets: Most tokens of an answer to each prompt.
        most: Most sequences.
    """
    times, field = request.n or 1, "n" if len(lengths) == 1 else "prompt"
    sequences, tokens = len(lengths) * times, sum(lengths) * times
    if sequences > most:
        reason = f"'{field}': asks for {sequences} sequences; the limit is {most}."
        raise ApiError.invalid(field, reason)
    if sequences > 1 and tokens > _MOST_PROMPT_TOKENS:
        raise ApiError.invalid(
            field,
            f"'{field}': the prompts of all sequences have {tokens} tokens; the limit is "
            f"{_MOST_PROMPT_TOKENS}.",
        )
    least = request.min_tokens or 0
    if least > min(budgets):
        reason = f"min_tokens ({least}) is larger than max_tokens ({min(budgets)})."
        raise ApiError.invalid("min_tokens", reason)
    likeliest = -1 if request.likeliest is None else request.likeliest
    scored = sum(budgets) + (sum(lengths) if _scores_prompts(request) else 0)
    logprobs = scored * times * (likeliest + 1)
    if logprobs > _MOST_LOGPROBS:
        raise ApiError.invalid(
            "logprobs",
            f"'logprobs': up to {logprobs} log-probabilities; the limit is {_MOST_LOGPROBS}. Ask for "
            "fewer tokens, sequences or likeliest tokens.",
        )


def sampling_of(
    request: GenerationRequest, defaults: Defaults, tokenizer: Any, grammar: Grammar | None
) -> Sampling:
    """Return the settings that all sequences of a request have."""
    given = request.model_dump(include=_SAME_NAMES, exclude_none=True)
    if given.keys() & _CUTS and not defaults.sampling.temperature:
        given = {"temperature": 1.0} | given
    sampling = replace(defaults.sampling, **given)
    # Bad words at a text's start and after a space.
    words = [word.lstrip() or word for word in request.bad_words or ()]
    texts = [text for word in words for text in (word, f" {word}")]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return replace(
        sampling,
        temperature=sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(sampling.top_k, 0),
        min_tokens=request.min_tokens or 0,
        end_tokens=(*defaults.end_tokens, *(request.stop_token_ids or ())),
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        logprobs=request.likeliest,
        prompt_logprobs=_scores_prompts(request),
        grammar=grammar,
        allowed_tokens=tuple(request.allowed_token_ids) if request.allowed_token_ids else None,
        bad_words=tuple(tuple(tokens) for tokens in found if tokens),
    )


def _scores_prompts(request: GenerationRequest) -> bool:
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    return echoes and request.likeliest is not None

"""Requests and deliveries of engines as messages (proto/eaas/rpc/v1/engine.proto)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import numpy as np

from eaas.generation.errors import ApiError, EngineStoppedError, as_api_error
from eaas.generation.grammar import Grammar
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores
from eaas.generation.work import Delivery, Work
from eaas.rpc.v1 import engine_pb2 as pb

__all__ = [
    "IDLE_REPORT_S",
    "MOST_BYTES",
    "PROTOCOL_VERSION",
    "SILENCE_S",
    "delivered",
    "deliveries",
    "submit",
    "work",
]

PROTOCOL_VERSION = 1
"""Version of these messages. Within a version they only gain fields."""
MOST_BYTES = 16 << 20
"""Most bytes of a message: a prompt of a million tokens has 4 MB."""
SILENCE_S = 10.0
"""A connection on which nothing is heard for so long is ended."""
IDLE_REPORT_S = 1.0
"""How often an engine without requests tells its frontends that it lives."""
# Fields that a message has under the same name.
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "end_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logprobs", "prompt_logprobs"),
)


def submit(attempt: int, given: Work) -> pb.Submit:
    """Make the message that sends an engine a request.

    Args:
        attempt: Unique in the connection.
        given: The request.
    """
    return pb.Submit(
        attempt=attempt,
        tokens=_bytes_of(given.tokens),
        prompt_length=given.prompt_length,
        max_tokens=given.max_tokens,
        end_tokens=given.end_tokens,
        sampling=_settings(given.sampling),
        servers=given.servers,
        trace=given.trace,
    )


def work(message: pb.Submit, name: str, grammar: Grammar | None = None) -> Work:
    """Read a request.

    Args:
        message: The request.
        name: Its id in this process.
        grammar: Its grammar, compiled; None: it has none.
    """
    tokens = array("I")
    tokens.frombytes(message.tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return Work(
        id=name,
        tokens=tokens.tolist(),
        prompt_length=message.prompt_length,
        max_tokens=message.max_tokens,
        end_tokens=tuple(message.end_tokens),
        sampling=_sampling(message.sampling, grammar),
        servers=message.servers,
        trace=message.trace,
    )


def deliveries(given: Iterable[tuple[int, Delivery]]) -> pb.Deliveries:
    """Make the message of what a step has for some attempts.

    Args:
        given: Attempts, each with what it gets.
    """
    message = pb.Deliveries()
    for attempt, each in given:
        if each.finished or each.servers or each.scores or each.prompt_scores or each.error:
            message.others.append(_delivered(attempt, each))
        elif len(each.tokens) == 1:
            message.attempts.append(attempt)
            message.tokens.append(each.tokens[0])
        elif each.tokens:
            message.others.append(_delivered(attempt, each))
        else:
            message.begun.append(attempt)
    return message


def delivered(message: pb.Deliveries) -> Iterable[tuple[int, Delivery]]:
    """Yield the attempts of a message with what they get."""
    for attempt in message.begun:
        yield attempt, Delivery([])
    for attempt, token in zip(message.attempts, message.tokens, strict=True):
        yield attempt, Delivery([token])
    for each in message.others:
        yield (
            each.attempt,
            Delivery(
                list(each.tokens),
                each.finished,
                _error(each.failure) if each.HasField("failure") else None,
                servers=dict(each.servers),
                scores=_scores(each.scores) if each.HasField("scores") else None,
                prompt_scores=_scores(each.prompt_scores)
                if each.HasField("prompt_scores")
                else None,
            ),
        )


def _settings(sampling: Sampling) -> pb.SamplingSettings:
    plain = {name: getattr(sampling, name) for name in _PLAIN}
    message = pb.SamplingSettings(**plain, seed=str(sampling.seed))
    for token, bias in sampling.logit_bias:
        message.bias_tokens.append(token)
        message.biases.append(bias)
    if sampling.grammar is not None:
        message.grammar.text = sampling.grammar.text
        message.grammar.end_tokens.extend(sampling.grammar.end_tokens)
        message.grammar.field = sampling.grammar.field
    if sampling.allowed_tokens is not None:
        message.allowed_tokens.tokens.extend(sampling.allowed_tokens)
    for word in sampling.bad_words:
        message.bad_words.add(tokens=word)
    return message


def _sampling(message: pb.SamplingSettings, grammar: Grammar | None) -> Sampling:
    plain = {name: getattr(message, name) for name in _PLAIN}
    has_allowed = message.HasField("allowed_tokens")
    return Sampling(
        **plain
        | {
            "seed": int(message.seed),
            "end_tokens": tuple(message.end_tokens),
            "logprobs": message.logprobs if message.HasField("logprobs") else None,
            "logit_bias": tuple(zip(message.bias_tokens, message.biases, strict=True)),
            "grammar": grammar,
            "allowed_tokens": tuple(message.allowed_tokens.tokens) if has_allowed else None,
            "bad_words": tuple(tuple(word.tokens) for word in message.bad_words),
        }
    )


def _delivered(attempt: int, given: Delivery) -> pb.Delivered:
    message = pb.Delivered(
        attempt=attempt,
        tokens=given.tokens,
        finished=given.finished,
        servers=given.servers,
    )
    if given.error is not None:
        error = as_api_error(given.error)
        message.failure.status = error.status
        message.failure.message = error.message
        message.failure.type = error.type
        message.failure.param = error.param or ""
        message.failure.code = error.code or ""
        message.failure.stopped = isinstance(given.error, EngineStoppedError)
    if given.scores is not None:
        message.scores.CopyFrom(_score_message(given.scores))
    if given.prompt_scores is not None:
        message.prompt_scores.CopyFrom(_score_message(given.prompt_scores))
    return message


def _error(message: pb.Failure) -> Exception:
    if message.stopped:
        return EngineStoppedError(message.message)
    return ApiError(
        message.status,
        message.message,
        type=message.type,
        param=message.param or None,
        code=message.code or None,
    )


def _score_message(scores: Scores) -> pb.TokenScores:
    return pb.TokenScores(
        logprobs=scores.logprob_T.astype("<f4").tobytes(),
        top_tokens=scores.top_TK.astype("<i4").tobytes(),
        top_logprobs=scores.top_logprob_TK.astype("<f4").tobytes(),
    )


def _scores(message: pb.TokenScores) -> Scores:
    logprob_T = np.frombuffer(message.logprobs, "<f4")
    shape = len(logprob_T), -1 if message.top_tokens else 0
    return Scores(
        logprob_T,
        np.frombuffer(message.top_tokens, "<i4").reshape(shape),
        np.frombuffer(message.top_logprobs, "<f4").reshape(shape),
    )


def _bytes_of(tokens: Iterable[int]) -> bytes:
    found = array("I", tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()

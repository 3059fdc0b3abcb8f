"""Requests and deliveries survive their way over a connection."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eaas.errors import ClusterError
from eaas.generation import messages
from eaas.generation.errors import ApiError, EngineStoppedError
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores
from eaas.generation.work import Delivery, Work
from eaas.rpc.v1 import engine_pb2 as pb

tokens = st.integers(0, 2**32 - 1)
some = st.lists(tokens, max_size=4)
floats = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_p=floats,
    top_k=tokens,
    min_p=floats,
    seed=st.integers(-(2**65), 2**65),
    min_tokens=tokens,
    end_tokens=some.map(tuple),
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.lists(st.tuples(tokens, floats), max_size=3).map(tuple),
    logprobs=st.none() | tokens,
    prompt_logprobs=st.booleans(),
    allowed_tokens=st.none() | some.map(tuple),
    bad_words=st.lists(some.map(tuple), max_size=3).map(tuple),
)
works = st.builds(
    Work,
    id=st.just("here"),
    tokens=st.lists(tokens, min_size=1, max_size=8),
    prompt_length=tokens,
    max_tokens=tokens,
    end_tokens=some.map(tuple),
    sampling=samplings,
    servers=st.booleans(),
    trace=st.binary(max_size=24),
)


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    values = np.random.default_rng(draw(st.integers(0, 9)))
    return Scores(
        values.standard_normal(rows, np.float32),
        values.integers(0, 99, (rows, columns), np.int32),
        values.standard_normal((rows, columns), np.float32),
    )


deliveries = st.builds(
    Delivery,
    tokens=some,
    finished=st.booleans(),
    servers=st.dictionaries(st.text(), tokens, max_size=2),
    scores=st.none() | scores(),
    prompt_scores=st.none() | scores(),
)


@given(works, st.integers(1, 2**64 - 1))
def test_a_request_arrives_as_it_was_sent(work: Work, attempt: int) -> None:
    data = messages.submit(attempt, work).SerializeToString()
    message = pb.Submit.FromString(data)
    assert message.attempt == attempt
    assert messages.work(message, "here") == work


def assert_same(was: Delivery, now: Delivery) -> None:
    assert list(was.tokens) == list(now.tokens)
    assert (was.finished, dict(was.servers)) == (now.finished, dict(now.servers))
    for sent, got in ((was.scores, now.scores), (was.prompt_scores, now.prompt_scores)):
        assert (sent is None) == (got is None)
        if sent is not None and got is not None:
            np.testing.assert_array_equal(sent.logprob_T, got.logprob_T)
            np.testing.assert_array_equal(sent.top_TK, got.top_TK)
            np.testing.assert_array_equal(sent.top_logprob_TK, got.top_logprob_TK)


@given(st.dictionaries(st.integers(0, 2**64 - 1), deliveries, max_size=4))
def test_a_step_arrives_as_it_was_sent(step: dict[int, Delivery]) -> None:
    data = messages.deliveries(step.items()).SerializeToString()
    message = pb.Deliveries.FromString(data)
    found = dict(messages.delivered(message))
    assert found.keys() == step.keys()
    for attempt, was in step.items():
        assert_same(was, found[attempt])


def test_errors_arrive_with_their_kind() -> None:
    wrong = ApiError(400, "no", type="t", param="p", code="c")
    ended = [
        Delivery([], True, error)
        for error in (wrong, EngineStoppedError("end"), ClusterError("gone"), KeyError("k"))
    ]
    message = messages.deliveries(enumerate(ended))
    (_, one), (_, two), (_, three), (_, four) = messages.delivered(message)
    assert isinstance(one.error, ApiError)
    assert one.error.body() == wrong.body()
    assert isinstance(two.error, EngineStoppedError)
    assert isinstance(three.error, ApiError)
    assert (three.error.status, three.error.code) == (503, "experts_unavailable")
    assert isinstance(four.error, ApiError)
    assert four.error.status == 500
    assert all(each.finished for each in (one, two, three, four))

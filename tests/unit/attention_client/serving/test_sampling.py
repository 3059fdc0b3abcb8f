from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.serving.api_error import ApiError
from attention_client.serving.generation.penalties import History
from attention_client.serving.generation.sampling import (
    GREEDY,
    BatchSampler,
    Row,
    Sampling,
    choose,
)

VOCABULARY = 50


def chosen(scores_BV: torch.Tensor, rows: list[tuple[Sampling, int]]) -> list[int]:
    settings = [Row(place, *row) for place, row in enumerate(rows)]
    return choose(scores_BV.clone(), settings).tolist()


def random_scores(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=1, max_size=6))
def test_greedy_rows_are_the_argmax_whatever_runs_beside_them(
    seed: int, greedy: list[bool]
) -> None:
    # Rounding to bf16 makes ties.
    scores_BV = random_scores(len(greedy), seed).bfloat16().float()
    rows = [(GREEDY if g else Sampling(temperature=1.5, seed=7), 4) for g in greedy]
    for b, token in enumerate(chosen(scores_BV, rows)):
        if greedy[b]:
            assert token == int(scores_BV[b].argmax())


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10_000))
def test_a_row_depends_on_its_own_settings_only(seed: int, length: int) -> None:
    scores_BV = random_scores(3)
    sampling = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=seed)
    alone = chosen(scores_BV[1:2], [(sampling, length)])
    other = Sampling(temperature=2.0, seed=1)
    assert chosen(scores_BV, [(other, 3), (sampling, length), (GREEDY, 9)])[1:2] == alone


def test_draws_follow_softmax() -> None:
    scores_BV = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    temperature, draws = 0.7, 4000
    counts = torch.zeros(4)
    for length in range(draws):
        counts[chosen(scores_BV, [(Sampling(temperature=temperature, seed=3), length)])[0]] += 1
    expected = torch.softmax(scores_BV[0] / temperature, -1)
    torch.testing.assert_close(counts / draws, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=2.0, top_k=1), 1),
        (Sampling(temperature=2.0, top_k=3), 3),
        (Sampling(temperature=1.0, top_p=1e-6), 1),
        (Sampling(temperature=1e-5), 1),
    ],
)
def test_filters_leave_the_likeliest(sampling: Sampling, allowed: int) -> None:
    scores_BV = random_scores(1)
    best = set(scores_BV[0].topk(allowed).indices.tolist())
    seen = {
        chosen(scores_BV, [(dataclasses.replace(sampling, seed=seed), 5)])[0] for seed in range(60)
    }
    assert seen == best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_before_the_minimum_length(temperature: float) -> None:
    scores_BV = torch.zeros(1, VOCABULARY)
    scores_BV[0, [5, 6]] = 100.0
    sampling = Sampling(temperature=temperature, min_length=10, end_tokens=(5, 6))
    assert chosen(scores_BV, [(sampling, 9)])[0] not in (5, 6)
    assert chosen(scores_BV, [(sampling, 10)])[0] in (5, 6)


class State:
    """What the sampler reads of transformers' request."""

    def __init__(self, name: str, prompt: list[int], sampling: Sampling | None) -> None:
        self.request_id = name
        self.initial_tokens = prompt
        self.generated_tokens: list[int] = []
        self.logit_processor_kwargs: dict[str, Any] = {}
        if sampling is not None:
            self.logit_processor_kwargs["sampling"] = sampling

    @property
    def state(self) -> State:
        return self

    def evicted(self) -> State:
        again = State(self.request_id, self.initial_tokens + self.generated_tokens, None)
        again.logit_processor_kwargs = copy.deepcopy(self.logit_processor_kwargs)
        return again


def fail(_request_id: str, error: ApiError) -> None:
    raise error


def step(sampler: BatchSampler, states: list[State], scores_BV: torch.Tensor) -> list[int]:
    arguments = sampler.prepare_tensor_args(states)
    assert arguments.shape == (len(states),)
    return sampler(scores_BV, arguments).argmax(-1).tolist()


def test_plain_rows_are_left_alone() -> None:
    sampler, scores_BV = BatchSampler(fail), random_scores(4)
    before_BV = scores_BV.clone()
    states = [State("a", [1], None), State("b", [2, 3], GREEDY)]
    out_BV = sampler(scores_BV[:2], sampler.prepare_tensor_args(states))
    assert out_BV.data_ptr() == scores_BV.data_ptr()
    drawn = State("c", [1], Sampling(temperature=1.0))
    reported = State("d", [1], Sampling(logprobs=3))
    chosen = step(sampler, [*states, drawn, reported], scores_BV)
    assert torch.equal(scores_BV[:2], before_BV[:2])
    assert (scores_BV[2:] > -torch.inf).sum(-1).tolist() == [1, 1]
    assert chosen[:2] == before_BV[:2].argmax(-1).tolist()
    assert chosen[3] == int(before_BV[3].argmax())
    scores = sampler.take_scores()
    assert list(scores) == ["d"]
    assert scores["d"].logprob_T[0] == scores["d"].top_logprob_TK[0, 0]
    assert scores["d"].top_TK[0].tolist() == before_BV[3].topk(3).indices.tolist()
    assert sampler.take_scores() == {}


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**31))
def test_an_evicted_request_keeps_its_penalties(evictions: list[bool], seed: int) -> None:
    """A request that leaves the cache and returns chooses as if it had stayed."""
    settings = Sampling(
        prompt_length=2, frequency_penalty=1.5, repetition_penalty=1.2, temperature=0.9, seed=seed
    )
    sampler = BatchSampler(fail)
    stays, moves = State("a", [4, 5], settings), State("b", [4, 5], settings)
    for n, evicts in enumerate(evictions):
        scores_BV = random_scores(1, seed + n).expand(2, -1).clone()
        first, second = step(sampler, [stays, moves], scores_BV)
        assert first == second
        stays.generated_tokens.append(first)
        moves.generated_tokens.append(second)
        if evicts:
            moves = moves.evicted()


def test_a_bias_is_added_before_the_choice() -> None:
    scores_BV = random_scores(2)
    sampling = Sampling(logit_bias=((7, 100.0), (8, -100.0)))
    assert chosen(scores_BV, [(sampling, 3), (GREEDY, 3)]) == [7, int(scores_BV[1].argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_setting_brings_a_forbidden_token_back(temperature: float) -> None:
    scores_BV = random_scores(2)
    history = History(1)
    history.extend([1, 7, 8])
    sampling = Sampling(
        temperature=temperature,
        logit_bias=((7, 100.0), (8, 100.0)),
        presence_penalty=-2.0,
        repetition_penalty=0.5,
    )
    allowed = np.zeros(VOCABULARY + 14, bool)
    allowed[[3, 7]] = True
    rows = [Row(0, sampling, 3, history, allowed), Row(1, sampling, 3, history)]
    guided, free = choose(scores_BV, rows).tolist()
    assert guided == 7
    assert free in (7, 8)
    allowed[7] = False
    assert choose(random_scores(1), rows[:1]).tolist() == [3]


FLOAT32 = {"min_value": 2.0**-126, "max_value": 3.4e38}
LEGAL = st.builds(
    Sampling,
    # generation_config.json may have any temperature; below 1e-5 it is 0.
    temperature=st.sampled_from([0.0, 1e-5, 1.0, 2.0, 1e30]) | st.floats(1e-5, 3.4e38),
    top_p=st.just(1.0) | st.floats(2.0**-126, 1),
    top_k=st.sampled_from([0, 1, VOCABULARY - 1, VOCABULARY, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 1e-50, 1.0]) | st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(**FLOAT32),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-100, 100)), max_size=5
    ).map(tuple),
    end_tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=3).map(tuple),
    min_length=st.sampled_from([0, 9]),
)
# A model may also compute what is no number.
LOGITS = st.sampled_from(
    [0.0, -3.0, 3.0, 1e-40, 1e38, -1e38, torch.inf, -torch.inf, torch.nan]
) | st.floats(-50, 50, width=32)


@given(LEGAL, st.lists(LOGITS, min_size=VOCABULARY, max_size=VOCABULARY), st.data())
def test_no_legal_settings_make_a_banned_token_possible(
    sampling: Sampling, logits: list[float], data: st.DataObject
) -> None:
    """Neither before the minimum length nor in a grammar, whatever the model computes."""
    tokens = st.integers(0, VOCABULARY - 1)
    history = History(2)
    history.extend(data.draw(st.lists(tokens, max_size=8)))
    allowed = None
    legal = set(range(VOCABULARY))
    if sampling.min_length:
        legal -= set(sampling.end_tokens)
    else:
        legal = data.draw(st.sets(tokens, min_size=1))
        allowed = np.zeros(VOCABULARY, bool)
        allowed[list(legal)] = True
    row = Row(0, sampling, 8, history, allowed)
    assert choose(torch.tensor([logits]), [row]).item() in legal


def test_an_extreme_penalty_leaves_other_tokens_in_their_order() -> None:
    scores_BV = random_scores(1)
    best, second = scores_BV[0].topk(2).indices.tolist()
    history = History(1)
    history.extend([best])
    for penalty in (2.0**-126, 3.4e38):
        row = Row(0, Sampling(repetition_penalty=penalty), 1, history)
        assert choose(scores_BV.clone(), [row]).tolist() == [best if penalty < 1 else second]

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.generation.penalties import History
from attention_client.generation.sampling import Chooser, Chosen, Row, choose, choose_tokens
from eaas.generation.sampling import GREEDY, Sampling
from eaas.generation.work import Work

VOCABULARY = 50


def chosen(scores_BV: torch.Tensor, rows: list[tuple[Sampling, int]]) -> list[int]:
    settings = [Row(*row) for row in rows]
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_before_the_minimum_length(temperature: float) -> None:
    scores_BV = torch.zeros(1, VOCABULARY)
    scores_BV[0, [5, 6]] = 100.0
    sampling = Sampling(temperature=temperature, min_tokens=7, end_tokens=(5, 6))
    assert step([state(sampling, 9)], scores_BV)[0].token not in (5, 6)
    assert step([state(sampling, 10)], scores_BV)[0].token in (5, 6)


def state(sampling: Sampling, length: int = 4) -> State:
    """A sequence with a prompt of 3 tokens."""
    return State(Work("a", [4, 5, 6, *[7] * (length - 3)], 3, 100, (), sampling))


class State:
    """A sequence, and what is kept for the choice of its tokens."""

    def __init__(self, work: Work) -> None:
        self.work, self.tokens = work, list(work.tokens)
        self.chooser = Chooser(work)

    def moved(self) -> State:
        """Go on with what is known of the sequence elsewhere."""
        return State(dataclasses.replace(self.work, tokens=self.tokens))


def step(states: list[State], scores_BV: torch.Tensor) -> list[Chosen]:
    rows = [each.chooser.row(each.tokens) for each in states]
    return choose_tokens(scores_BV, rows)


def test_scores_are_of_the_logits_as_they_were() -> None:
    scores_BV = random_scores(4)
    before_BV = scores_BV.clone()
    sampling = Sampling(logprobs=3, logit_bias=((7, 100.0),))
    reported, drawn = state(sampling), state(Sampling(temperature=1.0))
    rows = [each.chooser.row(each.tokens) for each in (drawn, reported)]
    found = choose_tokens(scores_BV, [None, *rows, None])
    assert torch.equal(scores_BV, before_BV)
    assert [found[b].token for b in (0, 3)] == before_BV[[0, 3]].argmax(-1).tolist()
    assert [each.scores is None for each in found] == [True, True, False, True]
    assert found[2].token == 7
    scores = found[2].scores
    assert scores is not None
    logprob_V = before_BV[2].log_softmax(-1)
    assert scores.logprob_T[0] == pytest.approx(float(logprob_V[7]))
    assert scores.top_TK[0].tolist() == before_BV[2].topk(3).indices.tolist()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**31))
def test_a_sequence_that_moves_chooses_as_one_that_stays(moves: list[bool], seed: int) -> None:
    settings = Sampling(
        temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, seed=seed,
        min_tokens=4, end_tokens=(1, 2, 3), bad_words=((5, 6), (9,), (8, 8, 8)),
    )  # fmt: skip
    here, there = state(settings), state(settings)
    for n, goes in enumerate(moves):
        scores_BV = random_scores(1, seed + n).expand(2, -1)
        first, second = (each.token for each in step([here, there], scores_BV))
        assert first == second
        here.tokens.append(first)
        there.tokens.append(second)
        if goes:
            there = there.moved()


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
    allowed, banned = None, sampling.end_tokens
    legal = set(range(VOCABULARY)) - set(banned)
    if data.draw(st.booleans()):
        legal, banned = data.draw(st.sets(tokens, min_size=1)), ()
        # A grammar's vocabulary may be larger than the model's.
        allowed = np.zeros(VOCABULARY + data.draw(st.sampled_from([0, 14])), bool)
        allowed[list(legal)] = True
    row = Row(sampling, 8, history, allowed, banned)
    assert choose(torch.tensor([logits]), [row]).item() in legal


def test_an_extreme_penalty_leaves_other_tokens_in_their_order() -> None:
    scores_BV = random_scores(1)
    best, second = scores_BV[0].topk(2).indices.tolist()
    history = History(1)
    history.extend([best])
    for penalty in (2.0**-126, 3.4e38):
        row = Row(Sampling(repetition_penalty=penalty), 1, history)
        assert choose(scores_BV.clone(), [row]).tolist() == [best if penalty < 1 else second]

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.serving.generation.sampling import GREEDY, Row, Sampling, choose

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

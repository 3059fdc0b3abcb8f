"""Draws of many rows at once, compared with transformers' filters row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from attention_client.generation import draws as module
from attention_client.generation.draws import Draw, draw, key

VOCABULARY = 60
SETTINGS = st.builds(
    Draw,
    temperature=st.floats(0.05, 2),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 59, 60, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    key=st.integers(-(2**63), 2**63 - 1),
)


def random_scores(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def kept(scores_V: torch.Tensor, settings: Draw) -> set[int]:
    """The tokens that transformers' filters leave."""
    scores = scores_V[None] / settings.temperature
    if settings.min_p:
        scores = MinPLogitsWarper(settings.min_p)(None, scores)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(None, scores)
    if settings.top_p < 1:
        scores = TopPLogitsWarper(settings.top_p)(None, scores)
    return set((scores[0] > -torch.inf).nonzero()[:, 0].tolist())


@given(
    st.lists(SETTINGS, min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([4, 1024])
)
def test_a_row_draws_what_it_draws_alone_from_what_its_filters_keep(
    settings: list[Draw], seed: int, likely: int
) -> None:
    scores_SV = random_scores(len(settings), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LIKELY", likely)
        together = draw(scores_SV.clone(), settings).tolist()
        alone = [int(draw(scores_SV[s : s + 1].clone(), [each])) for s, each in enumerate(settings)]
    assert together == alone
    for scores_V, each, token in zip(scores_SV, settings, together, strict=True):
        assert token in kept(scores_V, each)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 3, "top_p": 0.9}]
)
def test_draws_follow_the_filtered_distribution(settings: dict[str, float]) -> None:
    count = 6000
    scores_V = torch.tensor([0.0, 1.0, 2.0, 1.5, -torch.inf])
    each = [Draw(0.7, **({"top_p": 1.0, "top_k": 0, "min_p": 0.0} | settings), key=key(3, length))  # type: ignore[arg-type]
            for length in range(count)]  # fmt: skip
    found_V = torch.bincount(draw(scores_V.repeat(count, 1), each), minlength=5) / count
    probability_V = torch.softmax(scores_V / 0.7, -1)
    probability_V[[token not in kept(scores_V, each[0]) for token in range(5)]] = 0
    torch.testing.assert_close(found_V, probability_V / probability_V.sum(), atol=0.02, rtol=0)


def test_tokens_with_equal_scores_are_kept_together() -> None:
    scores_SV = torch.zeros(1, VOCABULARY)
    drawn = {
        int(draw(scores_SV.clone(), [Draw(1.0, 1.0, 1, 0.0, key(seed, 0))])) for seed in range(400)
    }
    assert len(drawn) == VOCABULARY


@given(st.integers(-(2**63), 2**63 - 1))
def test_noise_is_finite(seed: int) -> None:
    noise = module._gumbel(torch.tensor([[seed]]), torch.arange(1000))
    assert torch.isfinite(noise).all()
    assert -4 < float(noise.min()) < float(noise.max()) < 40


def test_a_row_without_choices_is_answered() -> None:
    empty = torch.full((1, 5), -torch.inf)
    for settings in (Draw(1.0, 1.0, 0, 0.0, 7), Draw(1.0, 0.5, 2, 0.1, 7)):
        assert 0 <= int(draw(empty.clone(), [settings])) < 5
    nan = torch.full((1, 5), torch.nan)
    assert 0 <= int(draw(nan, [Draw(1.0, 0.5, 2, 0.1, 7)])) < 5

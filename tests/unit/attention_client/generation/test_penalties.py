"""Penalties of many rows at once, compared with vLLM's formulas row by row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.generation.penalties import History, penalize
from eaas.generation.sampling import Sampling

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=15)
SEQUENCES = st.lists(
    st.tuples(
        TOKENS.filter(bool),
        TOKENS,
        st.floats(-2, 2),
        st.floats(-2, 2),
        st.floats(0.25, 4),
    ),
    min_size=1,
    max_size=4,
)


def by_formula(
    scores_V: torch.Tensor, prompt: list[int], answer: list[int], sampling: Sampling
) -> torch.Tensor:
    scores_V = scores_V.clone()
    for token in {*prompt, *answer}:
        penalty = sampling.repetition_penalty
        scores_V[token] *= 1 / penalty if scores_V[token] > 0 else penalty
        count = answer.count(token)
        scores_V[token] -= count * sampling.frequency_penalty
        scores_V[token] -= (count > 0) * sampling.presence_penalty
    return scores_V


@given(SEQUENCES, st.integers(0, 2**31), st.data())
def test_rows_are_penalized_by_their_own_tokens(
    sequences: list[tuple[list[int], list[int], float, float, float]],
    seed: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_RV = torch.randn(len(sequences) + 1, VOCABULARY, generator=generator)
    expected = scores_RV.clone()
    settings, histories = [], []
    for r, (prompt, answer, presence, frequency, repetition) in enumerate(sequences):
        sampling = Sampling(
            presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
        )
        history = History(len(prompt))
        tokens = prompt + answer
        while history.length < len(tokens):
            size = data.draw(st.integers(1, len(tokens) - history.length))
            history.extend(tokens[history.length : history.length + size])
        settings.append(sampling)
        histories.append(history)
        expected[r] = by_formula(scores_RV[r], prompt, answer, sampling)
    penalize(scores_RV, range(len(sequences)), settings, histories)
    torch.testing.assert_close(scores_RV, expected)

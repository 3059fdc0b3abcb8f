"""Predicted loads: counts, prefix cache, correction by prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.scheduler.predictor import Predictor, correlation

LAYERS, EXPERTS, TOP_K = 2, 8, 2


class Gates:
    """A dry run by token value; counts its tokens."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        self.asked += len(tokens)
        ids_TK = np.array([[token % EXPERTS, (token + 3) % EXPERTS] for token in tokens])
        return np.stack([ids_TK, (ids_TK + 1) % EXPERTS])


def predictor(gates: Gates, **options: int) -> Predictor:
    return Predictor(gates, LAYERS, EXPERTS, TOP_K, **options)


def load_of(ids_LTK: np.ndarray) -> np.ndarray:
    """Pairs per token of each expert of each layer, by hand."""
    load_LE = np.zeros((LAYERS, EXPERTS))
    for layer, ids_TK in enumerate(ids_LTK):
        for expert in ids_TK.ravel():
            load_LE[layer, expert] += 1 / ids_LTK.shape[1]
    return load_LE.ravel()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80))
def test_a_prediction_is_pairs_per_token(tokens: list[int]) -> None:
    gates = Gates()
    known = predictor(gates)
    wanted_E = load_of(Gates()(tokens))
    np.testing.assert_allclose(known.predict(tokens), wanted_E)
    assert known.predict(tokens).sum() == pytest.approx(LAYERS * TOP_K)
    # The second time only what is no whole block was asked for.
    assert gates.asked == len(tokens) + len(tokens) % 16
    assert known.cached_tokens == len(tokens) - len(tokens) % 16


def test_a_block_is_cached_by_its_whole_prefix() -> None:
    gates = Gates()
    known = predictor(gates)
    known.predict([1] * 16 + [2] * 16)
    asked = gates.asked
    known.predict([1] * 16 + [3] * 16)
    assert gates.asked - asked == 16
    known.predict([4] * 16 + [2] * 16)  # the same block after something else
    assert gates.asked - asked == 16 + 32


def test_the_cache_evicts_the_least_recently_used_block() -> None:
    gates = Gates()
    known = predictor(gates, most_blocks=2)
    for token in (1, 2, 1, 3, 1):
        known.predict([token] * 16)
    assert gates.asked == 3 * 16
    known.predict([2] * 16)
    assert gates.asked == 4 * 16


def test_prefill_replaces_the_dry_run() -> None:
    known = predictor(Gates())
    tokens = list(range(40))
    known.predict(tokens)
    seen_LTK = Gates()([token + 5 for token in tokens])
    np.testing.assert_allclose(known.saw(tokens, 0, seen_LTK), load_of(seen_LTK))
    whole = known.predict(tokens[:32])
    np.testing.assert_allclose(whole, load_of(seen_LTK[:, :32]))


def test_a_cached_prefix_is_not_learned_again() -> None:
    """Known blocks of the prefix stay, and the blocks after it are learned."""
    known = predictor(Gates())
    tokens = list(range(48))
    known.saw(tokens[:16], 0, Gates()(tokens[:16]))
    rest_LTK = Gates()([token + 2 for token in tokens[16:]])
    np.testing.assert_allclose(known.saw(tokens, 16, rest_LTK), load_of(rest_LTK))
    wanted_LTK = np.concatenate([Gates()(tokens[:16]), rest_LTK], axis=1)
    np.testing.assert_allclose(known.predict(tokens), load_of(wanted_LTK))


def test_biased_dry_runs_are_corrected() -> None:
    """Expert 0 is chosen half as often as predicted, expert 1 three times as often."""
    rng = np.random.default_rng(3)

    def skewed(count: int) -> tuple[np.ndarray, np.ndarray]:
        dry_TK = rng.integers(0, EXPERTS, (count, 1))
        true_TK = np.where((dry_TK == 0) & (rng.random((count, 1)) < 0.5), 1, dry_TK)
        return dry_TK[None], true_TK[None]

    answers: list[np.ndarray] = []
    known = Predictor(lambda tokens: answers.pop(), 1, EXPERTS, 1)
    for number in range(60):
        dry_LTK, true_LTK = skewed(64)
        answers.append(dry_LTK)
        tokens = [1000 * number + place for place in range(64)]
        known.predict(tokens)
        known.saw(tokens, 0, true_LTK)
    answers.append(np.arange(EXPERTS)[None, :, None])
    corrected_E = known.predict(list(range(-EXPERTS, 0)))
    np.testing.assert_allclose(corrected_E * EXPERTS, [0.5, 1.5, 1, 1, 1, 1, 1, 1], atol=0.2)
    # And what is usual is the mean of what was seen.
    np.testing.assert_allclose(known.usual(), corrected_E, atol=0.06)


def test_correlation() -> None:
    a_E, b_E = np.array([1.0, 2, 3, 5]), np.array([2.0, 4, 6, 10])
    assert correlation(a_E, b_E) == pytest.approx(1)
    assert correlation(a_E, -b_E) == pytest.approx(-1)
    rng = np.random.default_rng(0)
    x_E, y_E = rng.random(50), rng.random(50)
    assert correlation(x_E, y_E) == pytest.approx(np.corrcoef(x_E, y_E)[0, 1])
    assert correlation(a_E, np.ones(4)) == 0

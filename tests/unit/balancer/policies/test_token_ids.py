"""Ids of tokens' experts are told from counts of tokens by expert."""

from typing import Any

import numpy as np
import pytest

from balancer.policies import FractionalBalancer, ScalpelBalancer, rebalance
from balancer.policies import token_ids as module
from simulator.routing import are_token_ids, count_token_ids


def token_ids(
    tokens: int, layers: int, top_k: int, experts: int, seed: int = 0, *, skewed: bool = True
) -> Any:
    """A router's choices: (tokens, layers, top-k), the best first."""
    rng = np.random.default_rng(seed)
    score_TLE = rng.gumbel(size=(tokens, layers, experts))
    if skewed:
        score_TLE += rng.normal(0, 2, (layers, experts))
    return np.argsort(-score_TLE, axis=2)[:, :, :top_k]


SHAPES = [
    (2079, 32, 2, 8),
    (300, 24, 2, 60),
    (700, 8, 4, 16),
    (1100, 1, 2, 8),
    (1500, 1, 8, 128),
    (50, 58, 8, 256),
    (260, 16, 1, 16),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.int16])
def test_ids_are_known_as_such(shape: tuple[int, int, int, int], dtype: Any) -> None:
    assert are_token_ids(token_ids(*shape).astype(dtype))
    assert are_token_ids(token_ids(*shape, seed=1, skewed=False).astype(dtype))
    assert not are_token_ids(token_ids(*shape).astype(np.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_counts_of_the_same_routing_are_counts(shape, tokens) -> None:
    counts_ILE = count_token_ids(token_ids(*shape), shape[3], tokens)
    assert counts_ILE.sum() == shape[0] * shape[1] * shape[2]
    assert not are_token_ids(counts_ILE)


@pytest.mark.parametrize("experts", [4, 8, 16, 32])
@pytest.mark.parametrize("peak", [3, 50, 900, 100_000])
def test_counts_that_do_not_add_up_are_counts(experts: int, peak: int) -> None:
    """Like those of engines that count padding, or drop tokens over an expert's capacity."""
    rng = np.random.default_rng(peak)
    assert not are_token_ids(rng.integers(0, peak, (2000, 12, experts)))
    assert not are_token_ids(rng.poisson(peak, (2000, 12, experts)))
    assert not are_token_ids(rng.integers(0, 900, (10, 4, experts)))


@pytest.mark.parametrize("tokens", [1, 7, 1 << 20])
def test_the_place_of_a_wrong_id_is_told(tokens: int) -> None:
    ids_TLK = np.tile(np.array([4, 1, 6]), (500, 3, 1))
    for place, value, named in (
        ((431, 2, 1), -1, "token 431, layer 2 has the id -1.*leave padded tokens out"),
        ((431, 2, 1), 8, "token 431, layer 2 has the id 8, and 8 experts are 0 to 7$"),
        ((431, 2, 1), 6, "token 431, layer 2 has the expert 6 twice"),
    ):
        wrong = ids_TLK.copy()
        wrong[place] = value
        with pytest.raises(ValueError, match=named):
            count_token_ids(wrong, 8, tokens)
    assert count_token_ids(ids_TLK, 8, tokens).sum() == ids_TLK.size
    with pytest.raises(ValueError, match="0 tokens"):
        count_token_ids(ids_TLK, 8, 0)


def test_many_ids_are_counted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_TLK = token_ids(301, 3, 2, 8)
    whole = count_token_ids(ids_TLK, 8, 16)
    monkeypatch.setattr(module, "_BLOCK_IDS", 3 * 2 * 16 * 5)
    assert np.array_equal(count_token_ids(ids_TLK, 8, 16), whole)
    for iteration, layer, expert in ((0, 0, 0), (11, 2, 5), (18, 1, 7)):
        part = ids_TLK[16 * iteration : 16 * (iteration + 1), layer]
        assert whole[iteration, layer, expert] == (part == expert).sum()


def test_policies_refuse_ids() -> None:
    ids_TLK = token_ids(2079, 32, 2, 8)
    for call in (
        lambda ids: FractionalBalancer(2, 4).step(ids),
        lambda ids: ScalpelBalancer(2, 4).step(ids),
        lambda ids: rebalance(ids, 2, 0, state={}),
    ):
        with pytest.raises(ValueError, match=r"\(2079, 32, 2\).*ids of each token's.*floats"):
            call(ids_TLK)
    # Who says that they are loads is believed.
    assert FractionalBalancer(2, 4).step(ids_TLK.astype(np.float32)).holds_LSE.shape == (32, 2, 2)

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.quality.formats import BASELINE, FORMATS
from benchmarks.quality.losses import perplexity, ratio
from benchmarks.quality.texts import cut, held_out_texts, read_text
from eaas.errors import ConfigError
from examples.demo_training import corpus, sources

DEMO = Path(__file__).parents[3] / "examples/demo"
LOSS = st.floats(0, 10)


@given(st.lists(st.tuples(LOSS, LOSS), min_size=2), LOSS)
def test_the_ratio_is_that_of_the_perplexities(
    pairs: list[tuple[float, float]], more: float
) -> None:
    one, other = ({"a": [pair[i] for pair in pairs]} for i in (0, 1))
    found, error = ratio(one, other)
    assert found == pytest.approx(perplexity(one) / perplexity(other))
    assert error >= 0
    # As much worse everywhere: no error, however different the windows are.
    worse = {"a": [loss + more for loss in one["a"]]}
    found, error = ratio(worse, one)
    assert found == pytest.approx(math.exp(more))
    assert error == pytest.approx(0, abs=1e-9)


def test_every_window_counts_alike() -> None:
    losses = {"a": [1.0, 2.0], "b": [6.0]}
    assert perplexity(losses) == pytest.approx(math.exp(3))
    found, error = ratio(losses, {"a": [1.0, 1.0], "b": [4.0]})
    assert found == pytest.approx(math.e)
    assert error == pytest.approx(math.e / math.sqrt(3))


@given(st.integers(2, 9), st.integers(1, 9), st.integers(2, 200))
def test_windows_do_not_overlap(length: int, windows: int, tokens: int) -> None:
    def windows_of(count: int) -> torch.Tensor:
        return cut({"a": "x" * count}, lambda text: range(len(text)), windows, length)["a"]

    if tokens < length:
        with pytest.raises(ConfigError, match=f"a has {tokens} tokens"):
            windows_of(tokens)
        return
    found = windows_of(tokens)
    assert found.shape == (min(windows, tokens // length), length)
    assert (found.diff(dim=1) == 1).all()
    assert (found[:, 0].diff() >= length).all()
    assert found.min() >= 0
    assert found.max() < tokens


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--text {tmp_path / 'gone'}"):
        read_text(tmp_path / "gone")


def test_text_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise sources.SourceError("no network")

    monkeypatch.setattr(corpus, "build_corpus", refused)
    with pytest.raises(ConfigError, match="no network; or give a text of your own"):
        held_out_texts()


def test_held_out_text_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = np.concatenate(
        [
            [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            for text in ("Déjà  vu\n", " x\n\n")
        ]
    )
    made = corpus.Corpus({}, {"code": ids}, {})
    monkeypatch.setattr(corpus, "build_corpus", lambda *_: (tokenizer, made))
    (text,) = held_out_texts().values()
    assert tokenizer(text)["input_ids"] == ids.tolist()


def test_what_loads_quantised_is_stored_as_it_was() -> None:
    weight_NK = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = {}
    for name in (BASELINE, "int8", "int4"):
        packed = FORMATS[name].scheme.pack(weight_NK)
        assert FORMATS[name].scheme.config == {}
        assert torch.equal(packed.tensors["weight"], weight_NK)
        errors[name] = float((packed.weight_NK.float() - weight_NK.float()).norm())
    assert errors[BASELINE] == 0 < errors["int8"] < errors["int4"]

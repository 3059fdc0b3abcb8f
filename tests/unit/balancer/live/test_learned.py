"""Knobs in a file: what is written is read, what is none or lost is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from balancer.live.control import Signals
from balancer.live.learned import (
    BOUNDS,
    FEATURES,
    KNOBS,
    HeldOut,
    KnobFile,
    LearnedKnobs,
    LearnedTuner,
    features,
    read_knobs,
    write_knobs,
)
from balancer.live.tuner import ControlLoop, Looked
from balancer.main import _tuner
from balancer.policies.scalpel import check_knobs
from eaas.errors import ConfigError

F, K, N = len(FEATURES), len(KNOBS), 3
WON = HeldOut("t.npz", "0f", 8, 64, 1.6, 1.56, 1.3, 1.25, 100, 120)


def network(seed: int = 0, size: float = 1.0) -> LearnedKnobs:
    dice = np.random.default_rng(seed)
    shapes = [(F,), (F,), (N, F), (N,), (K, N), (K,)]
    arrays = [size * dice.standard_normal(shape) for shape in shapes]
    arrays[1] = 0.1 + np.abs(arrays[1])
    return LearnedKnobs(*arrays)


def file(*held_out: HeldOut) -> KnobFile:
    return KnobFile(network(), held_out or (WON,), {"traces": [{"trace": "a.npz"}], "loss": [2.0]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "knobs.safetensors"
    written = file(WON, replace(WON, learned_cost=1.62))
    write_knobs(path, written)
    found = read_knobs(path, must_win=True)
    for field in fields(LearnedKnobs):
        assert (getattr(found.knobs, field.name) == getattr(written.knobs, field.name)).all()
    assert found.held_out == list(written.held_out)
    assert found.provenance == written.provenance
    assert found.ratio == pytest.approx((78 / 80 + 81 / 80) / 2)


@pytest.mark.parametrize("cost", [1.6, 1.616])
def test_knobs_that_did_not_win_are_for_looking_at_only(tmp_path: Path, cost: float) -> None:
    path = tmp_path / "knobs.safetensors"
    write_knobs(path, file(replace(WON, learned_cost=cost)))
    assert not read_knobs(path, must_win=False).wins
    with pytest.raises(ConfigError, match=r"lost to the static defaults.*10[01]\.00 %") as caught:
        _tuner(str(path), "scalpel")
    assert "\n" not in str(caught.value)


def test_who_sets_knobs(tmp_path: Path) -> None:
    path = tmp_path / "knobs.safetensors"
    write_knobs(path, file())
    assert _tuner("static", "eplb") is None
    assert isinstance(_tuner("live", "fractional"), ControlLoop)
    assert isinstance(_tuner(str(path), "scalpel"), LearnedTuner)
    with pytest.raises(ConfigError, match="knobs of scalpel, and the policy is spread: give"):
        _tuner(str(path), "spread")


def test_what_is_no_such_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    write_knobs(good, file())
    whole = good.read_bytes()
    arrays = load_file(good)
    said = {"format": "eaas-knobs-1", "held_out": "[]", "provenance": "{}"}

    def refused(why: str) -> None:
        with pytest.raises(ConfigError, match=why) as caught:
            read_knobs(bad, must_win=False)
        assert "\n" not in str(caught.value)
        assert str(bad) in str(caught.value)

    refused("bad.safetensors has no knobs")
    for content in (b"", b"nothing", whole[:40], whole[:-8]):
        bad.write_bytes(content)
        refused("has no knobs of `eaas knobs train`")
    save_file(arrays, bad)
    refused("its format is None")
    save_file(arrays, bad, said)
    refused("traces held out")
    save_file(arrays, bad, said | {"held_out": '[{"trace": "x"}]'})
    refused("missing")
    with safe_open(good, framework="numpy") as stored:
        said = stored.metadata()
    save_file(arrays, bad, said)
    read_knobs(bad, must_win=True)
    save_file(arrays | {"out_K": arrays["out_K"] * np.nan}, bad, said)
    refused("out_K has float64")
    save_file(arrays | {"hidden_N": np.zeros(N + 1)}, bad, said)
    refused("wanted finite float64")
    save_file({name: a for name, a in arrays.items() if name != "out_K"}, bad, said)
    refused("out_K")


@given(st.integers(0, 1000), st.floats(0.1, 30))
def test_whatever_was_learned_is_within_the_policys_bounds(seed: int, size: float) -> None:
    dice = np.random.default_rng(seed)
    knobs = network(seed, size)(size * dice.standard_normal(F))
    assert tuple(knobs) == KNOBS
    assert isinstance(knobs["budget"], int)
    assert all(BOUNDS[name][0] <= value <= BOUNDS[name][1] for name, value in knobs.items())
    check_knobs(**knobs, matching="greedy")  # type: ignore[arg-type]


def test_features_of_a_window() -> None:
    window_WLE = np.zeros((8, 2, 4), np.int64)
    window_WLE[:4, :, 0] = window_WLE[4:, :, 1] = 10
    found = dict(zip(FEATURES, features(window_WLE, 2, 6), strict=True))
    assert found["shift"] == 1
    assert found["skew"] == pytest.approx(1)
    assert found["redundancy"] == 0.5
    assert found["log_experts_per_server"] == 1
    assert found["log_tokens"] == pytest.approx(np.log10(81))
    assert np.isfinite(features(np.zeros((8, 2, 4), np.int64), 2, 6)).all()


def test_live_knobs_stay_while_what_is_said_is_nearly_the_same() -> None:
    hidden_NF = np.zeros((N, F))
    hidden_NF[0, FEATURES.index("skew")] = 1.0
    tuner = LearnedTuner(
        LearnedKnobs(
            *(np.zeros(F), np.ones(F), hidden_NF, np.zeros(N), np.full((K, N), 3.0), np.zeros(K))
        )
    )
    dice = np.random.default_rng(0)

    def look(skew: float) -> dict[str, float]:
        part_E = np.arange(1, 9) ** -skew
        counts = dice.multinomial(100_000, part_E / part_E.sum(), (12, 2))
        tuned = tuner.look(Looked(counts, 4, 12, Signals(0.0)))
        assert bool(tuned.reasons) == (dict(tuned.knobs) != before), "a change says why"
        return dict(tuned.knobs)

    before: dict[str, float] = {}
    first = before = look(0.5)
    for _ in range(5):
        assert look(0.5) is not first
        assert look(0.5) == first
    before = first
    assert look(3.0) != first

"""Predictors of spare slots, and their benchmark."""

from benchmarks.spares.predictors import PREDICTORS
from benchmarks.spares.run import TRANSFERS, bench_spares
from simulator.traces import generate_trace


def test_every_predictor_is_measured() -> None:
    trace = generate_trace("drift", iterations=40, layers=2, experts=16, tokens=128, top_k=2)
    document = bench_spares(trace, 4, say=lambda _line: None)
    assert [row["name"] for row in document["predictors"]] == list(PREDICTORS)
    assert [row["name"] for row in document["transfers"]] == list(TRANSFERS)
    assert 1 <= document["best"] < document["none"]
    assert all(1 <= row["par"] < document["none"] for row in document["predictors"])
    assert document["plan_us"] > 0


def test_predictors_see_no_later_load_unless_they_say_so() -> None:
    counts = generate_trace("flips", iterations=12, layers=2, experts=8, tokens=64).counts_ILE
    other = counts.copy()
    other[8:] = other[8:, :, ::-1]
    for name, make in PREDICTORS.items():
        first, second = make(counts), make(other)
        for calls in range(1, 9):
            one, two = first(calls, 0), second(calls, 0)
            assert one is not None
            assert two is not None
            assert one.shape == two.shape
            assert (one == two).all() == (name != "the next load" or calls < 8)

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attention_client.engines.transformers.overlap.choice import OverlapChoice

DECODE = 32, 32


def run(choice: OverlapChoice, whole_s: float, halves_s: float, passes: int) -> list[bool]:
    ways = []
    for _ in range(passes):
        overlapped = choice.choose(*DECODE)
        choice.observe(*DECODE, overlapped, halves_s if overlapped else whole_s)
        ways.append(overlapped)
    return ways


@given(st.floats(1e-4, 1), st.floats(0.05, 20))
def test_the_faster_mode_is_used_nearly_always(whole_s: float, ratio: float) -> None:
    ways = run(OverlapChoice(), whole_s, whole_s * ratio, 506)
    assert sum(ways[:6]) == 3, "both were tried alike"
    expected = ratio < 0.97
    assert sum(way is expected for way in ways[6:]) >= 490
    assert sum(way is not expected for way in ways[6:]) >= 9, "it goes on looking at the other one"


def test_it_switches_when_the_other_mode_becomes_faster() -> None:
    choice = OverlapChoice()
    assert not any(run(choice, 0.010, 0.015, 40)[6:])
    # The sequences have grown: attention takes longer.
    ways = run(choice, 0.030, 0.020, 400)
    assert all(ways[250:300]) or sum(ways[250:]) >= 145


def test_a_few_slow_passes_change_nothing() -> None:
    choice = OverlapChoice()
    run(choice, 0.010, 0.008, 20)
    choice.observe(*DECODE, True, 5.0)
    choice.observe(*DECODE, True, 5.0)
    assert choice.choose(*DECODE)


def test_sizes_are_learned_separately() -> None:
    choice = OverlapChoice()
    run(choice, 0.010, 0.001, 20)
    for size in (DECODE, (63, 63)):
        assert choice.choose(*size)
    for other in ((32, 4), (64, 64)):
        assert not choice.choose(*other), "which begins with its own trials"

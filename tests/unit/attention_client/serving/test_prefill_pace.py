"""Prompt tokens beside running answers: steps of both stay within a multiple of steps of answers alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attention_client.serving.generation.prefill_pace import PrefillPace


def test_no_limit_without_answers_or_times() -> None:
    pace = PrefillPace()
    assert pace.limit(0, 1) is None
    assert pace.limit(3, 1) is None
    pace.observe(3, 0, 0.01)
    assert pace.limit(3, 1) is None
    pace.observe(3, 100, 0.02)
    assert pace.limit(3, 1) is not None
    assert pace.limit(0, 1) is None


def test_a_new_number_of_answers_is_timed_alone_first() -> None:
    pace = PrefillPace()
    pace.observe(1, 0, 0.002)
    pace.observe(1, 512, 0.052)
    assert pace.limit(1, 1) == 30
    assert pace.limit(16, 1) == 0
    pace.observe(16, 0, 0.010)
    assert pace.limit(16, 1) == 153  # 15 ms of 98 us


def test_small_chunks_that_cost_more_per_token_do_not_make_ever_smaller_ones() -> None:
    """Each step has a fixed cost, so small chunks look slow; larger ones must stay in use."""
    pace = PrefillPace()
    pace.observe(8, 0, 0.010)
    pace.observe(8, 512, 0.060)
    pace.observe(8, 16, 0.019)
    for _ in range(20):
        limit = pace.limit(8, 1)
        assert limit is not None
        pace.observe(8, limit, 0.010 + 0.004 + limit * 1e-4)
    assert 80 <= (pace.limit(8, 1) or 0) <= 120


def test_chunks_grow_beyond_the_prompts_seen_so_far() -> None:
    pace = PrefillPace()
    pace.observe(8, 0, 0.010)
    pace.observe(8, 20, 0.012)
    assert pace.limit(8, 1) == 150


def test_no_limit_where_more_prompts_wait_than_answers_run() -> None:
    pace = PrefillPace()
    pace.observe(3, 0, 0.01)
    pace.observe(3, 100, 0.02)
    assert pace.limit(3, 3) is not None
    assert pace.limit(3, 4) is None


@given(
    answer_s=st.floats(1e-4, 1.0),
    token_s=st.floats(1e-6, 1e-2),
    chunk=st.integers(8, 4096),
    answers=st.integers(1, 64),
)
def test_a_step_takes_three_times_as_long_at_most(
    answer_s: float, token_s: float, chunk: int, answers: int
) -> None:
    pace = PrefillPace()
    for _ in range(20):
        pace.observe(answers, 0, answer_s)
        limit = pace.limit(answers, 1)
        assert limit != 0
        tokens = chunk if limit is None else min(chunk, limit)
        pace.observe(answers, tokens, answer_s + tokens * token_s)
    last = pace.limit(answers, 1)
    assert last is not None
    # A few tokens are prefilled however long they take, so that a prompt ends.
    assert last == 8 or answer_s + last * token_s <= 3 * answer_s
    assert last >= min(8, chunk)


@given(slow=st.floats(1.0, 100.0))
def test_one_slow_step_changes_little(slow: float) -> None:
    pace = PrefillPace()
    for _ in range(20):
        pace.observe(4, 0, 0.01)
        pace.observe(4, 100, 0.02)
    usual = pace.limit(4, 1)
    pace.observe(4, 0, slow)
    pace.observe(4, 100, slow)
    assert usual is not None
    assert usual / 2 <= (pace.limit(4, 1) or 0) <= usual * 2

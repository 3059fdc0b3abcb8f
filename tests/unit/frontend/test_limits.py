"""What requests share: no more than there is, and all of it back at their ends."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.errors import error_response
from frontend.limits import Quota


def test_the_next_request_beyond_the_limit_is_refused_until_one_ends() -> None:
    quota = Quota(3, "All is in use.")
    with ExitStack() as running:
        for _ in range(3):
            running.enter_context(quota.share())(1)
        with pytest.raises(ApiError, match="All is in use") as refused:
            running.enter_context(quota.share())(1)
        response = error_response(refused.value)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
    with quota.share() as take:
        take(3)


def test_a_failed_request_gives_all_back() -> None:
    quota = Quota(1, "")

    def fail() -> None:
        with quota.share() as take:
            take(1)
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=10))
def test_shares_stay_below_the_limit_and_come_back(amounts: list[list[int]]) -> None:
    quota = Quota(100, "")
    with ExitStack() as shares:
        taken = 0
        for each in amounts:
            take = shares.enter_context(quota.share())
            for amount in each:
                try:
                    take(amount)
                except ApiError:
                    assert taken + amount > 100
                else:
                    taken += amount
        assert taken <= 100
    with quota.share() as take:
        take(100)

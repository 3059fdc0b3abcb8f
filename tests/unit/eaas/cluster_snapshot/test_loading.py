"""Progress of loads: rate, time left, text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.cluster_snapshot.loading import Loading, LoadingFold, bytes_per_s
from eaas.types import Member, MemberState, Role

MB, GB = 10**6, 10**9


def server(name: str = "a", total: int = 0, loaded: int = 0, **fields: Any) -> Member:
    fields = {"state": MemberState.JOINING, "incarnation": 1, **fields}
    return Member(
        *(name, Role.EXPERT_SERVER, 7, "here", "here:1"),
        loading_bytes=total,
        loaded_bytes=loaded,
        **fields,
    )


@pytest.mark.parametrize(
    ("heartbeats", "rate"),
    [
        ([], None),
        ([(3.0, 5)], None),
        ([(3.0, 5), (3.1, 9)], None),
        ([(3.0, 5), (4.0, 5)], 0.0),
        ([(3.0, 5), (4.0, 99), (5.0, 25)], 10.0),
    ],
)
def test_the_rate_needs_two_heartbeats(
    heartbeats: list[tuple[float, int]], rate: float | None
) -> None:
    assert bytes_per_s(heartbeats) == rate


@given(rate=st.integers(1, 10**10), seconds=st.integers(2, 200), every=st.integers(1, 5))
def test_a_steady_load_is_predicted(rate: int, seconds: int, every: int) -> None:
    fold, total = LoadingFold(), rate * seconds
    for second in range(0, seconds, every):
        found = fold.take([server(total=total, loaded=rate * second)], 100.0 + second)["a"]
        assert (found.total_bytes, found.loaded_bytes) == (total, rate * second)
        if second:
            assert found.bytes_per_s == pytest.approx(rate)
            assert found.left_s == pytest.approx(seconds - second)
        else:
            assert found.left_s is None


def test_the_rate_follows_the_last_half_minute() -> None:
    fold = LoadingFold()
    loaded = 0
    for second in range(100):
        loaded += 1000 if second < 50 else 10
        found = fold.take([server(total=10**6, loaded=loaded)], float(second))["a"]
    assert found.bytes_per_s == pytest.approx(10)


def test_the_time_is_that_of_the_heartbeat() -> None:
    fold = LoadingFold()
    fold.take([server(total=100, loaded=0)], 10.0)
    # The same heartbeat again.
    again = fold.take([server(total=100, loaded=0, silence_s=0.9)], 10.95)["a"]
    assert again.bytes_per_s is None
    found = fold.take([server(total=100, loaded=10, silence_s=0.5)], 11.5)["a"]
    assert found.bytes_per_s == pytest.approx(10)


def test_servers_that_load_nothing_have_no_progress() -> None:
    fold = LoadingFold()
    members = [
        server("idle"),
        server("busy", total=100, loaded=10),
        server("dead", total=100, loaded=10, state=MemberState.DEAD),
    ]
    assert set(fold.take(members, 1.0)) == {"busy"}
    assert fold.take([], 2.0) == {}
    # It begins anew, because nothing is known about the time between.
    assert fold.take(members, 3.0)["busy"].bytes_per_s is None


def test_another_load_begins_anew() -> None:
    for after in (
        server(total=300, loaded=60),
        server(total=100, loaded=0),
        server(total=100, loaded=60, incarnation=2),
    ):
        fold = LoadingFold()
        fold.take([server(total=100, loaded=10)], 0.0)
        assert fold.take([server(total=100, loaded=50)], 1.0)["a"].bytes_per_s == 40
        found = fold.take([after], 2.0)["a"]
        assert (found.loaded_bytes, found.bytes_per_s) == (after.loaded_bytes, None)


@pytest.mark.parametrize(
    ("loading", "text"),
    [
        (Loading(4 * GB, 0), "0.0 of 4.0 GB (0 %)"),
        (Loading(12 * GB, 3 * GB, 1.25e9), "3.0 of 12.0 GB (25 %), 1.2 GB/s, 7 s left"),
        (Loading(12_000 * GB, 0, 10e6), "0.0 of 12,000.0 GB (0 %), 10.0 MB/s, 20000 min left"),
        (Loading(1_200_000, 900_000, 10_000.0), "0.9 of 1.2 MB (75 %), 0.0 MB/s, 30 s left"),
        # It stands still, so that its end is unknown.
        (Loading(4 * GB, 2 * GB, 0.0), "2.0 of 4.0 GB (50 %), 0.0 MB/s"),
    ],
)
def test_text(loading: Loading, text: str) -> None:
    assert loading.text == text

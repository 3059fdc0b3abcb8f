"""Negotiation of the newest common version."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.net.grpc_failure import CallFailure
from eaas.versions import Versions, negotiate, refusal


class Server:
    """Answers with the version of the call."""

    def __init__(self, *spoken: int) -> None:
        self.spoken = Versions(*spoken)
        self.asked: list[int] = []

    def call(self, version: int) -> int:
        self.asked.append(version)
        if refused := refusal(self.spoken, version, "the slots", "a", "this server"):
            raise CallFailure(grpc.StatusCode.FAILED_PRECONDITION, *refused)
        return version


RANGES = st.tuples(st.integers(1, 9), st.integers(0, 3)).map(lambda r: Versions(r[0], r[0] + r[1]))


@given(RANGES, RANGES)
def test_the_newest_common_version_is_used(mine: Versions, theirs: Versions) -> None:
    server = Server(*theirs)
    common = range(max(mine.oldest, theirs.oldest), min(mine.newest, theirs.newest) + 1)
    if common:
        assert negotiate(mine, server.call) == common[-1]
    else:
        with pytest.raises(CallFailure) as caught:
            negotiate(mine, server.call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert len(server.asked) <= 2


def test_a_refusal_names_the_side_to_upgrade() -> None:
    with pytest.raises(CallFailure) as caught:
        negotiate(Versions(7, 7), Server(1, 2).call)
    assert caught.value.details() == (
        "a asks in version 7 of the slots, this server speaks versions 1 to 2: upgrade this server"
    )
    with pytest.raises(CallFailure) as caught:
        negotiate(Versions(1, 1), Server(3, 3).call)
    assert caught.value.details().endswith("this server speaks version 3: upgrade a")


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        *((said, [2]) for said in ("", "1", "x-1", "1-y", "-", "1-1-1", "\N{SUPERSCRIPT TWO}-2")),
        # A refusal that contradicts itself is not retried for ever.
        ("1-1", [2, 1]),
    ],
)
def test_other_refusals_are_raised(said: str, asked: list[int]) -> None:
    calls = []

    def call(version: int) -> None:
        calls.append(version)
        raise CallFailure(
            grpc.StatusCode.FAILED_PRECONDITION, "no", (("other", "1"), ("eaas-versions", said))
        )

    with pytest.raises(CallFailure):
        negotiate(Versions(1, 2), call)
    assert calls == asked

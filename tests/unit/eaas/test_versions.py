"""Two processes find the newest version that both speak, or say why there is none."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.versions import Versions, negotiate, refusal


class Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """What a caller sees of an aborted call."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata

    add_callback = cancel = initial_metadata = is_active = time_remaining = lambda *_: None


class Server:
    """Answers in which version it was asked."""

    def __init__(self, *spoken: int) -> None:
        self.spoken = Versions(*spoken)
        self.asked: list[int] = []

    def call(self, version: int) -> int:
        self.asked.append(version)
        if refused := refusal(self.spoken, version, "the slots", "a", "this server"):
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, *refused)
        return version


RANGES = st.tuples(st.integers(1, 9), st.integers(0, 3)).map(lambda r: Versions(r[0], r[0] + r[1]))


@given(RANGES, RANGES)
def test_the_newest_version_in_common_is_used_and_without_one_it_is_refused(
    mine: Versions, theirs: Versions
) -> None:
    server = Server(*theirs)
    common = range(max(mine.oldest, theirs.oldest), min(mine.newest, theirs.newest) + 1)
    if common:
        assert negotiate(mine, server.call) == common[-1]
    else:
        with pytest.raises(Refused) as caught:
            negotiate(mine, server.call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert len(server.asked) <= 2


def test_a_refusal_names_both_and_says_which_is_to_be_upgraded() -> None:
    with pytest.raises(Refused) as caught:
        negotiate(Versions(7, 7), Server(1, 2).call)
    assert caught.value.details() == (
        "a asks in version 7 of the slots, this server speaks versions 1 to 2: upgrade this server"
    )
    with pytest.raises(Refused) as caught:
        negotiate(Versions(1, 1), Server(3, 3).call)
    assert caught.value.details().endswith("this server speaks version 3: upgrade a")


@pytest.mark.parametrize("said", ["", "1", "x-1", "1-y", "-", "1-1-1", "\N{SUPERSCRIPT TWO}-2"])
def test_a_refusal_of_another_kind_is_passed_on(said: str) -> None:
    calls = []

    def call(version: int) -> None:
        calls.append(version)
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION, "no", (("other", "1"), ("eaas-versions", said))
        )

    with pytest.raises(Refused):
        negotiate(Versions(1, 2), call)
    assert calls == [2]


def test_whoever_refuses_what_it_says_that_it_speaks_is_not_asked_for_ever() -> None:
    calls = []

    def call(version: int) -> None:
        calls.append(version)
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "no", (("eaas-versions", "1-1"),))

    with pytest.raises(Refused):
        negotiate(Versions(1, 2), call)
    assert calls == [2, 1]

"""When calls follow a newer placement."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_client.placements import PlacementSwitch
from eaas.types import Placement

PATIENCE_S = 5.0


def placement(epoch: int, **servers: str) -> Placement:
    """Server -> the experts of one layer that it holds, as digits."""
    holds_LSE = np.zeros((1, len(servers), 10), dtype=bool)
    for s, experts in enumerate(servers.values()):
        holds_LSE[0, s, [int(e) for e in experts]] = True
    return Placement(epoch, tuple(servers), holds_LSE, holds_LSE.astype(np.float32))


def switch(*offers: Placement, connected: set[str]) -> PlacementSwitch:
    made = PlacementSwitch(PATIENCE_S)
    for offer in offers:
        made.offer(offer, 0.0)
        made.look(connected, 0.0)
    return made


def test_the_first_is_taken_up_with_nobody_connected() -> None:
    first = placement(1, a="01")
    assert switch(first, connected=set()).current is first


def test_an_older_or_the_same_epoch_is_no_news() -> None:
    made = switch(placement(3, a="01"), connected={"a"})
    assert not made.offer(placement(3, b="01"), 0.0)
    assert not made.offer(placement(2, b="01"), 0.0)
    assert made.offer(placement(4, b="01"), 0.0)
    assert not made.offer(placement(4, b="01"), 0.0)
    assert made.current.epoch == 3


def test_it_waits_for_the_only_server_that_has_an_expert() -> None:
    made = switch(placement(1, a="01", b="23"), connected={"a", "b"})
    newer = placement(2, a="01", c="23")
    assert made.offer(newer, 10.0)
    assert not made.look({"a", "b"}, 10.0)
    assert made.due_at() == 15.0
    assert not made.look({"a", "b"}, 14.9)
    assert made.look({"a", "b", "c"}, 14.9)
    assert made.current is newer
    assert made.due_at() is None


def test_its_patience_ends() -> None:
    made = switch(placement(1, a="01"), connected={"a"})
    made.offer(placement(2, c="01"), 10.0)
    assert made.look({"a"}, 15.0)
    assert made.current.epoch == 2


def test_what_is_lost_already_is_not_waited_for() -> None:
    made = switch(placement(1, a="01", b="23"), connected={"a", "b"})
    made.offer(placement(2, a="01", c="23"), 10.0)
    assert made.look({"a"}, 10.0)


def test_a_newer_one_takes_the_place_of_one_that_is_held_back() -> None:
    made = switch(placement(1, a="01"), connected={"a"})
    made.offer(placement(2, b="01"), 10.0)
    assert not made.look({"a"}, 10.0)
    newest = placement(3, a="0", b="01")
    assert made.offer(newest, 11.0)
    assert not made.look({"a"}, 11.0)
    assert made.look({"a", "b"}, 11.0)
    assert made.current is newest


SERVERS = st.dictionaries(
    st.sampled_from("abcd"), st.text("01234", max_size=5), min_size=1, max_size=4
)


@given(
    SERVERS, SERVERS, st.sets(st.sampled_from("abcd")), st.floats(0, PATIENCE_S, exclude_max=True)
)
def test_nothing_is_lost_by_a_switch_in_time(
    old: dict[str, str], new: dict[str, str], connected: set[str], waited_s: float
) -> None:
    made = switch(placement(1, **old), connected=set("abcd"))
    made.offer(placement(2, **new), 0.0)
    if made.look(connected, waited_s):
        reached = [{e for s in connected for e in what.get(s, "")} for what in (old, new)]
        assert reached[0] <= reached[1]

"""When layer calls switch to a newer placement."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_client.placement_adoption import PlacementSwitch
from eaas.types import Placement

PATIENCE_S = 5.0


def placement(epoch: int, **servers: str) -> Placement:
    """A one-layer placement: server -> its experts, as digits."""
    holds_LSE = np.zeros((1, len(servers), 10), dtype=bool)
    for s, experts in enumerate(servers.values()):
        holds_LSE[0, s, [int(e) for e in experts]] = True
    return Placement(epoch, tuple(servers), holds_LSE, holds_LSE.astype(np.float32))


def switch(*offers: Placement, connected: set[str]) -> PlacementSwitch:
    made = PlacementSwitch(PATIENCE_S)
    for offer in offers:
        made.offer(offer, 0.0)
        made.advance(connected, 0.0)
    return made


def test_the_first_placement_needs_no_connection() -> None:
    first = placement(1, a="01")
    assert switch(first, connected=set()).current is first


def test_an_older_or_equal_epoch_is_ignored() -> None:
    made = switch(placement(3, a="01"), connected={"a"})
    assert not made.offer(placement(3, b="01"), 0.0)
    assert not made.offer(placement(2, b="01"), 0.0)
    assert made.offer(placement(4, b="01"), 0.0)
    assert not made.offer(placement(4, b="01"), 0.0)
    assert made.current.epoch == 3


def test_it_waits_for_the_only_holder_of_an_expert() -> None:
    made = switch(placement(1, a="01", b="23"), connected={"a", "b"})
    newer = placement(2, a="01", c="23")
    assert made.offer(newer, 10.0)
    assert not made.advance({"a", "b"}, 10.0)
    assert made.due_at() == 15.0
    assert not made.advance({"a", "b"}, 14.9)
    assert made.advance({"a", "b", "c"}, 14.9)
    assert made.current is newer
    assert made.due_at() is None


def test_patience_ends_even_if_newer_placements_keep_coming() -> None:
    made = switch(placement(1, a="01"), connected={"a"})
    for second in range(5):
        made.offer(placement(2 + second, c="01"), 10.0 + second)
        assert not made.advance({"a"}, 10.0 + second)
        assert made.due_at() == 15.0
    assert made.advance({"a"}, 15.0)
    assert made.current.epoch == 6
    # The next held placement has its own patience.
    made.offer(placement(7, d="01"), 20.0)
    assert not made.advance({"a", "c"}, 24.9)
    assert made.due_at() == 25.0


def test_an_unreachable_expert_is_not_waited_for() -> None:
    made = switch(placement(1, a="01", b="23"), connected={"a", "b"})
    made.offer(placement(2, a="01", c="23"), 10.0)
    assert made.advance({"a"}, 10.0)


def test_a_newer_placement_replaces_the_held_one() -> None:
    made = switch(placement(1, a="01"), connected={"a"})
    made.offer(placement(2, b="01"), 10.0)
    assert not made.advance({"a"}, 10.0)
    newest = placement(3, a="0", b="01")
    assert made.offer(newest, 11.0)
    assert not made.advance({"a"}, 11.0)
    assert made.advance({"a", "b"}, 11.0)
    assert made.current is newest


SERVERS = st.dictionaries(
    st.sampled_from("abcd"), st.text("01234", max_size=5), min_size=1, max_size=4
)


@given(
    SERVERS, SERVERS, st.sets(st.sampled_from("abcd")), st.floats(0, PATIENCE_S, exclude_max=True)
)
def test_a_switch_within_patience_loses_no_expert(
    old: dict[str, str], new: dict[str, str], connected: set[str], waited_s: float
) -> None:
    made = switch(placement(1, **old), connected=set("abcd"))
    made.offer(placement(2, **new), 0.0)
    if made.advance(connected, waited_s):
        reached = [{e for s in connected for e in what.get(s, "")} for what in (old, new)]
        assert reached[0] <= reached[1]

from __future__ import annotations

import pytest

from eaas.wire import SlotState

LATENCY_S = 0.0105  # Ten rounds and a half of a millisecond.


@pytest.fixture
def far(benches):
    return benches(latency_s=LATENCY_S)


def test_a_request_is_seen_after_the_delay(far) -> None:
    slot = far.write(far.grant("a"), 2)
    for _ in range(11):  # The first round sees it written.
        assert far.arena.flags.load(slot) == SlotState.WRITTEN
        assert not far.kernel.batches
        far.step()
    assert far.loop.in_flight == 1
    far.step()
    assert (far.rows(slot) == 8).all()
    assert far.result(slot).service_us < 1000, "the delay is not the server's time"
    assert far.loop.in_flight == 0


def test_delays_overlap(far) -> None:
    """Delays overlap: two requests take as long as one."""
    first = far.write(far.grant("a"), 2, layer=0)
    for _ in range(5):
        far.step()
    second = far.write(far.grant("b"), 3, layer=2)
    for _ in range(7):
        far.step()
    assert far.kernel.batches == [(0, 2)]
    assert (far.rows(first) == 8).all()
    for _ in range(5):
        far.step()
    assert far.kernel.batches == [(0, 2), (2, 2)]
    assert (far.rows(second) == 12).all()


def test_the_budget_includes_the_delay(far) -> None:
    far.write(far.grant("a"), 2, budget_us=5_000)
    for _ in range(12):
        far.step()
    assert (far.loop.expired, far.loop.computed) == (1, 0)


def test_a_client_that_leaves_during_the_delay(far) -> None:
    """Its slot goes to another client, whose request is answered instead of the old one."""
    grant = far.grant("a", slots=far.slots)
    far.write(grant, 2)
    far.step()
    far.table.revoke(grant.connection_id)
    for _ in range(12):
        if far.loop.in_flight:
            far.step()
    assert not far.kernel.batches
    assert far.loop.in_flight == 0
    heir = far.grant("b", slots=far.slots)
    slot = far.write(heir, 5)
    for _ in range(12):
        far.step()
    assert (far.rows(slot) == 20).all()

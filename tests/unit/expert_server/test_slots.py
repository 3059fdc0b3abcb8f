import random
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.errors import SharedMemoryError
from eaas.types import Member, MemberState, Role
from eaas.wire import Arena, SlotState
from expert_server.transports.slot_ownership import Grant, SlotTable, last_gone

SLOTS = 6


@pytest.fixture
def arena() -> Arena:
    return Arena.create_local(SLOTS, 64, 64, 1)


def owners(table: SlotTable) -> list[Grant | None]:
    """The owner of each slot."""
    return [table.owner(slot) for slot in range(SLOTS)]


def claim(table: SlotTable, slots: Collection[int]) -> None:
    """Mark slots as the loop does, and no others."""
    table.busy[:] = bytes(slot in slots for slot in range(SLOTS))


def states(arena: Arena) -> list[int]:
    return [arena.flags.load(slot) for slot in range(arena.slots)]


def test_a_grant_frees_its_slots_and_marks_them_with_its_generation(arena: Arena) -> None:
    table = SlotTable(arena)
    first = table.grant("a", 1, 2)
    second = table.grant("b", 1, 3)
    assert first is not None
    assert second is not None
    assert {first.first_slot, first.first_slot + 1}.isdisjoint(
        range(second.first_slot, second.first_slot + 3)
    )
    assert second.generation > first.generation
    assert all(arena.generation(second.first_slot + i) == second.generation for i in range(3))
    assert table.grant("c", 1, 2) is None
    table.revoke(first.connection_id)
    assert states(arena)[first.first_slot : first.first_slot + 2] == [SlotState.OFFLINE] * 2
    table.revoke(first.connection_id)
    assert table.grant("c", 1, 2) is not None


def test_slots_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    """Row 28: shared memory full: never SIGBUS. Later clients get smaller slots, and at last none."""
    room = {0: 40, 2: 3, 4: 0}

    def allocate(_arena: Arena, first: int, _slots: int, payload: int, _result: int) -> None:
        if payload > room[first]:
            raise SharedMemoryError("full")

    monkeypatch.setattr(Arena, "allocate", allocate)
    table, sizes = SlotTable(arena), [(n, 2 * n) for n in (1, 2, 4, 8, 16, 32, 64)]
    found = [table.grant(name, 1, 2, sizes) for name in "ab"]
    capacities = [(g.payload_capacity, g.result_capacity) for g in found if g is not None]
    assert capacities == [(32, 64), (2, 4)]
    with pytest.raises(SharedMemoryError, match="full"):
        table.grant("c", 1, 2, sizes)
    assert table.clients() == {"a", "b"}


def test_the_loop_and_other_clients_do_not_wait_for_a_grants_memory(monkeypatch, arena) -> None:
    asked, given = threading.Event(), threading.Event()

    def allocate(_arena: Arena, first: int, *_: int) -> None:
        if first == 0:
            asked.set()
            assert given.wait(20)

    monkeypatch.setattr(Arena, "allocate", allocate)
    table = SlotTable(arena)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(table.grant, "a", 1, 2)
        assert asked.wait(20)
        try:
            assert owners(table) == [None] * SLOTS
            # The same client asks again, and another one does.
            second, other = table.grant("a", 1, 2), table.grant("b", 1, 2)
        finally:
            given.set()
        first = slow.result(20)
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.first_slot, second.first_slot, other.first_slot) == (0, 2, 4)
    # One connection of a client, the last one.
    assert set(table.grants()) == {first, other}
    assert states(arena)[2:4] == [SlotState.OFFLINE] * 2
    assert table.grant("c", 1, 2) is not None


def test_a_reconnecting_client_frees_its_former_slots(arena: Arena) -> None:
    table = SlotTable(arena)
    for incarnation in (1, 1, 2, 2):
        held = table.grant("a", incarnation, SLOTS)
        assert held is not None
    assert table.clients() == {"a"}


def test_revocation_up_to_an_incarnation(arena: Arena) -> None:
    table = SlotTable(arena)
    table.grant("a", 5, 2)
    assert table.revoke_incarnations("a", 4) == 0
    assert table.revoke_incarnations("b", 9) == 0
    assert table.revoke_incarnations("a", 5) == 1


def client(incarnation: int, pid: int = 1, state: MemberState = MemberState.SERVING) -> Member:
    return Member("a", Role.ATTENTION_CLIENT, pid, "h", "", state, incarnation=incarnation)


@pytest.mark.parametrize(
    ("former", "now", "gone"),
    [
        (None, client(3), 2),
        (client(3), client(3), 2),
        (client(3), client(3, state=MemberState.DEAD), 3),
        (client(3), client(4), 3),
        # After a monitor that lost its records: the first process was incarnation 3, the next is 1.
        (client(3), client(1, pid=2), 3),
        (client(1), client(1, pid=2), 1),
        (client(1), client(3, pid=2, state=MemberState.DEAD), 3),
    ],
)
def test_last_gone_incarnation(former: Member | None, now: Member, gone: int) -> None:
    """13: a client dies holding slots: flag 3 and reclaimed within W ..."""
    assert last_gone(former, now) == gone


def test_claimed_slots_are_not_granted(arena: Arena) -> None:
    table = SlotTable(arena)
    grant = table.grant("a", 1, SLOTS)
    assert grant is not None
    claim(table, [3])
    assert table.owner(3) is grant
    table.revoke(grant.connection_id)
    assert table.owner(3) is None
    assert table.grant("b", 1, 4) is None
    other = table.grant("b", 1, 3)
    assert other is not None
    assert other.first_slot == 0
    claim(table, [])
    assert table.grant("c", 1, 3) is not None


def test_slots_being_copied_are_not_granted(arena: Arena) -> None:
    table = SlotTable(arena)
    grant = table.grant("a", 1, SLOTS)
    assert grant is not None
    with table.copying(grant) as valid:
        assert valid
        table.revoke(grant.connection_id)
        assert table.grant("b", 1, 1) is None
    with table.copying(grant) as valid:
        assert not valid
        assert table.grant("b", 1, SLOTS) is not None


@given(
    st.lists(st.tuples(st.sampled_from("grbc"), st.integers(0, 5), st.integers(1, 3)), max_size=40)
)
def test_no_slot_has_two_owners_and_no_busy_slot_is_granted(steps) -> None:
    arena = Arena.create_local(SLOTS, 64, 64, 1)
    table = SlotTable(arena)
    grants, busy, generation = {}, set[int](), 0
    for step, number, slots in steps:
        before, changes = owners(table), table.changes
        if step == "g":
            grant = table.grant(f"client-{number}", slots, slots)
            if grant is not None:
                assert grant.generation > generation
                generation = grant.generation
                grants[number] = grant
        elif step == "r" and number in grants:
            table.revoke(grants[number].connection_id)
        elif step == "b":
            busy = set(range(number, min(SLOTS, number + slots)))
            claim(table, busy)
        elif step == "c":
            table.revoke_incarnations(f"client-{number}", slots)
        owned = []
        now = owners(table)
        assert (table.changes != changes) == (now != before)
        for slot, owner in enumerate(now):
            if owner is None:
                continue
            owned.append(slot)
            assert owner.first_slot <= slot < owner.first_slot + owner.slots
            assert table.get(owner.connection_id) is owner
            assert arena.generation(slot) == owner.generation
            assert arena.flags.load(slot) == SlotState.FREE
            if slot in busy:
                assert before[slot] is owner
        live = {now[slot] for slot in owned}
        assert live == set(table.grants())
        assert len(owned) == sum(grant.slots for grant in live if grant)


def test_row_13_a_thousand_dead_clients_leak_no_slot(arena: Arena) -> None:
    """Row 13: a client dies holding slots: flag 3 and reclaimed, generation + 1; nothing leaked over
    1,000 kills. Each dies with its slots in other states, and the loop works on some of them at that time.
    """
    rng = random.Random(13)
    table = SlotTable(arena)
    for incarnation in range(1, 1001):
        grant = table.grant("client", incarnation, rng.randint(1, SLOTS))
        assert grant is not None
        assert grant.generation == incarnation
        slots = range(grant.first_slot, grant.first_slot + grant.slots)
        for slot in slots:
            for move in (arena.client_write_done, arena.server_done)[: rng.randrange(3)]:
                assert move(slot)
        claimed = [slot for slot in slots if rng.random() < 0.5]
        claim(table, claimed)
        assert table.revoke_incarnations("client", incarnation) == 1
        assert all(arena.flags.load(slot) == SlotState.OFFLINE for slot in slots)
        # The loop's late writes change no flag.
        assert not any(arena.server_done(slot) for slot in claimed)
        claim(table, [])
    assert table.clients() == set()
    last = table.grant("another", 1, SLOTS)
    assert last is not None
    assert last.generation == 1001
    assert states(arena) == [SlotState.FREE] * SLOTS
    assert [arena.generation(slot) for slot in range(SLOTS)] == [1001] * SLOTS


def test_a_client_has_slots_of_two_incarnations_at_most(arena: Arena) -> None:
    table = SlotTable(arena)
    # Backwards: a late request of an earlier incarnation.
    for incarnation in range(2**63, 2**63 - 50, -1):
        assert table.grant("a", incarnation, 1) is not None
    assert sorted(g.client_incarnation for g in table.grants()) == [2**63 - 49, 2**63]
    assert table.grant("b", 1, SLOTS - 2) is not None


def test_slots_of_unknown_clients_are_freed(arena: Arena) -> None:
    table = SlotTable(arena)
    for name, incarnation in (("member", 1), ("stranger", 1), ("another incarnation", 2**63)):
        assert table.grant(name, incarnation, 2) is not None
    living = {"member": 1, "another incarnation": 3}
    # Recent connections may belong to members that the server does not know yet.
    assert table.revoke_unknown(living, older_than_s=60.0) == 0
    assert table.revoke_unknown(living, older_than_s=-1.0) == 2
    assert table.clients() == {"member"}

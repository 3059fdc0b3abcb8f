import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.wire import Arena, SlotState
from expert_server.slots import SlotTable

SLOTS = 6


@pytest.fixture
def arena() -> Arena:
    return Arena.create_local(SLOTS, 64, 64, 1)


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


def test_a_client_that_comes_again_gives_back_what_it_held(arena: Arena) -> None:
    table = SlotTable(arena)
    for incarnation in (1, 1, 2, 2):
        held = table.grant("a", incarnation, SLOTS)
        assert held is not None
    assert table.clients() == {"a"}


def test_only_lives_up_to_an_incarnation_are_revoked(arena: Arena) -> None:
    table = SlotTable(arena)
    table.grant("a", 5, 2)
    assert table.revoke_lives("a", 4) == 0
    assert table.revoke_lives("b", 9) == 0
    assert table.revoke_lives("a", 5) == 1


def test_what_the_loop_computes_is_not_handed_out(arena: Arena) -> None:
    table = SlotTable(arena)
    grant = table.grant("a", 1, SLOTS)
    assert grant is not None
    table.set_busy(frozenset({3}))
    table.revoke(grant.connection_id)
    assert table.grant("b", 1, 4) is None
    other = table.grant("b", 1, 3)
    assert other is not None
    assert other.first_slot == 0
    table.set_busy(frozenset())
    assert table.grant("c", 1, 3) is not None


def test_what_a_stream_copies_is_not_handed_out(arena: Arena) -> None:
    table = SlotTable(arena)
    grant = table.grant("a", 1, SLOTS)
    assert grant is not None
    with table.copying(grant) as lives:
        assert lives
        table.revoke(grant.connection_id)
        assert table.grant("b", 1, 1) is None
    with table.copying(grant) as lives:
        assert not lives
        assert table.grant("b", 1, SLOTS) is not None


@given(
    st.lists(st.tuples(st.sampled_from("grbc"), st.integers(0, 5), st.integers(1, 3)), max_size=40)
)
def test_no_slot_has_two_owners_and_no_busy_slot_changes_hands(steps) -> None:
    arena = Arena.create_local(SLOTS, 64, 64, 1)
    table = SlotTable(arena)
    grants, busy, generation = {}, frozenset(), 0
    for step, number, slots in steps:
        before = [table.owner(slot) for slot in range(SLOTS)]
        if step == "g":
            grant = table.grant(f"client-{number}", slots, slots)
            if grant is not None:
                assert grant.generation > generation
                generation = grant.generation
                grants[number] = grant
        elif step == "r" and number in grants:
            table.revoke(grants[number].connection_id)
        elif step == "b":
            busy = frozenset(range(number, min(SLOTS, number + slots)))
            table.set_busy(busy)
        elif step == "c":
            table.revoke_lives(f"client-{number}", slots)
        owned = []
        for slot in range(SLOTS):
            owner = table.owner(slot)
            if owner is None:
                continue
            owned.append(slot)
            assert owner.first_slot <= slot < owner.first_slot + owner.slots
            assert table.get(owner.connection_id) is owner
            assert arena.generation(slot) == owner.generation
            assert arena.flags.load(slot) == SlotState.FREE
            if slot in busy:
                assert before[slot] is owner
        live = {table.owner(slot) for slot in owned}
        assert len(owned) == sum(grant.slots for grant in live if grant)

"""Servers get experts according to clients' reports of reach."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancer.planner.candidates import Candidate, servers_of, within_partitions
from balancer.planner.reach import ReachTracker, judge
from eaas.types import Member, ServerReach
from placement_world import GRACE_S, World, client, server, settled

SERVERS = ("a", "b", "c", "d")
SETS = st.frozensets(st.sampled_from(SERVERS))


@given(
    servers=SETS,
    placed=SETS,
    clients=st.dictionaries(st.sampled_from("wxyz"), st.tuples(SETS, SETS)),
)
def test_the_rule(servers, placed, clients) -> None:
    placed &= servers
    cut = {c: over & servers for c, (over, _) in clients.items()}
    missing = {c: (over | more) & servers for c, (over, more) in clients.items()}
    verdict = judge(cut, missing, servers, placed)
    reached = {c: servers - cut[c] for c in cut}
    # What serves a client that is well goes on: nobody else takes a placed server from it.
    for c in cut:
        assert not reached[c] & placed & verdict.withheld
    # A client that reaches nobody changes nothing.
    some = {c: s for c, s in cut.items() if servers - s}
    others = judge(some, {c: missing[c] for c in some}, servers, placed)
    assert (others.withheld, others.partitions) == (verdict.withheld, verdict.partitions)
    assert verdict.cut_off == {c for c in cut if servers and not reached[c]}
    # Nobody else gets experts than those to which all are connected, or which have some.
    for s in servers - placed - verdict.withheld:
        assert all(s not in missing[c] for c in some)
    # Each client that reaches what is left has a partition of its own, or reaches all of it.
    left = servers - verdict.withheld
    for c in some:
        assert left <= reached[c] or reached[c] & left in {*verdict.partitions, frozenset()}
    if not any(missing.values()):
        assert not verdict.withheld


@given(
    seed=st.integers(0, 1000),
    partitions=st.frozensets(SETS.filter(bool), max_size=3),
    able=SETS,
    redundancy=st.integers(1, 3),
    room=st.none() | st.integers(4, 30),
)
def test_partitions_get_replicas(seed, partitions, able, redundancy, room) -> None:
    rng = np.random.default_rng(seed)
    holds_LSE = rng.random((2, 3, 5)) < 0.4
    holds_LSE[:, 0] |= ~holds_LSE.any(axis=1)
    shares_LSE = holds_LSE / holds_LSE.sum(axis=1, keepdims=True)
    candidate = Candidate(SERVERS[:3], holds_LSE, shares_LSE)
    capacity_S = None if room is None else np.full(len(servers_of(candidate, able)), room)
    found = within_partitions(candidate, partitions, able, redundancy, capacity_S)
    kept = [found.servers.index(s) for s in candidate.servers]
    assert (found.holds_LSE[:, kept] >= holds_LSE).all()
    assert np.allclose(found.shares_LSE.sum(axis=1), 1)
    assert ((found.shares_LSE > 0) == found.holds_LSE).all()
    before_S = holds_LSE.sum(axis=(0, 2))
    for s, name in enumerate(found.servers):
        count = found.holds_LSE[:, s].sum()
        grew = count > (before_S[s] if s < 3 else 0)
        assert not grew or (name in able and (room is None or count <= room))
    if room is None:
        for partition in partitions:
            inside = [s for s, name in enumerate(found.servers) if name in partition]
            wanted = min(redundancy, len(partition & able))
            assert (found.holds_LSE[:, inside].sum(axis=1) >= wanted).all()
    # Asked again it adds nothing.
    again_S = None if room is None else np.full(len(servers_of(found, able)), room)
    assert within_partitions(found, partitions, able, redundancy, again_S) is found


def reaching(name: str, *said: ServerReach, epoch: int = 0) -> Member:
    return replace(client(name, epoch), reach=said)


def connected(*servers: str) -> tuple[ServerReach, ...]:
    return tuple(ServerReach(s, 1) for s in servers)


def cut(server_id: str, *, lost: bool = True) -> ServerReach:
    return ServerReach(server_id, 1, "cannot be attached", lost)


def test_a_cut_counts_after_its_grace_and_is_told_once() -> None:
    tracker = ReachTracker(GRACE_S)
    servers = {s: server(s) for s in "abc"}
    placed = frozenset(servers)

    def at(now: float, *clients: Member) -> frozenset[frozenset[str]]:
        tracker.observe(clients, servers, now)
        return tracker.verdict(placed, now).partitions

    well = reaching("well", *connected("a", "b", "c"))
    lost = reaching("lost", *connected("a", "b"), cut("c"))
    assert not at(0.0, well, lost)
    assert tracker.due_at() == [GRACE_S]
    assert not at(GRACE_S - 1, well, reaching("lost", *connected("a", "b"), cut("c")))
    assert at(GRACE_S, well, lost) == {frozenset("ab")}
    verdict = tracker.verdict(placed, GRACE_S)
    (note,) = tracker.complaints(verdict, GRACE_S)
    assert note.refused is None
    assert "lost cannot reach c: cannot be attached" in note.reason
    assert not tracker.complaints(verdict, GRACE_S + 1)
    # Another process of the server is another matter; and so is a client that is back.
    servers["c"] = server("c", incarnation=2)
    assert not at(GRACE_S + 2, well, lost)
    servers["c"] = server("c")
    assert not at(GRACE_S + 3, well, reaching("lost", *connected("a", "b", "c")))


def test_clients_of_a_former_release_reach_everybody() -> None:
    tracker = ReachTracker(GRACE_S)
    tracker.observe([client("old")], {"a": server("a")}, 0.0)
    verdict = tracker.verdict(frozenset(), 1000.0)
    assert not verdict.withheld
    assert not verdict.cut_off


def settle(world: World) -> None:
    """Answer all calls; clients follow."""
    for _ in range(5):
        world.settle()
        for member in tuple(world.members.values()):
            if member.reach is not None and world.published is not None:
                epoch = world.published.epoch
                world.members[member.id] = replace(member, epoch=epoch)
        world.notify()
    world.settle()


def told(world: World, name: str, *said: ServerReach) -> None:
    """A client reports its reach."""
    world.members[name] = replace(world.members[name], reach=said)
    world.notify()


def of(names: str, **clients: tuple[ServerReach, ...]) -> World:
    """A settled world with clients that follow its placement and have not yet been heard of."""
    world = settled(*names, clients=())
    for name, said in clients.items():
        world.members[name] = reaching(name, *said, epoch=world.published.epoch)
    return world


def test_row_40_a_newcomer_gets_nothing_before_its_clients_are_connected() -> None:
    world = of("abc", c1=connected("a", "b", "c"))
    world.start("d")
    assert not world.calls
    told(world, "c1", *connected("a", "b", "c"), cut("d", lost=False))
    world.wait(100.0)
    settle(world)
    assert not world.stores["d"].any()
    assert [r.refused for r in world.refusals] == ["d"]
    assert "c1 cannot reach it: cannot be attached" in world.refusals[0].reason
    # A good one dies: what it held goes to the others, and not to the one that is out of reach.
    world.die("a")
    world.wait(GRACE_S)
    settle(world)
    assert world.published.servers == ("b", "c")
    told(world, "c1", *connected("b", "c", "d"))
    settle(world)
    assert world.published.servers == ("b", "c", "d")


def test_a_candidate_is_given_up_if_a_client_does_not_return_to_its_new_server() -> None:
    world = of("ab", c1=connected("a", "b", "c"))
    world.start("c")
    told(world, "c1", *connected("a", "b"), cut("c"))
    world.answer_all()
    wake_at = world.planner.wake_at(world.now)
    assert wake_at is not None
    world.wait(wake_at - world.now)
    settle(world)
    assert world.published.servers == ("a", "b")
    assert not world.stores["c"].any()


def test_row_40_a_client_that_is_cut_from_some_gets_replicas_elsewhere() -> None:
    world = of("abc", well=connected("a", "b", "c"), lost=connected("a", "b", "c"))
    before = world.published
    world.notify()
    told(world, "lost", *connected("a"), cut("b"), cut("c"))
    world.wait(GRACE_S - 1)
    settle(world)
    assert world.published is before
    world.wait(2.0)
    settle(world)
    assert world.stores["a"].all()
    assert (world.published.holds_LSE >= before.holds_LSE).all()
    # Once, and not again and again.
    epoch = world.published.epoch
    world.wait(1000.0)
    settle(world)
    assert world.published.epoch == epoch
    told(world, "lost", *connected("a", "b", "c"))
    settle(world)
    assert (world.published.holds_LSE == before.holds_LSE).all()
    world.assert_settled()


def test_a_client_that_is_cut_from_all_moves_nothing() -> None:
    world = of("abc", well=connected("a", "b", "c"), lost=tuple(map(cut, "abc")))
    before = world.published
    world.notify()
    world.wait(10 * GRACE_S)
    settle(world)
    assert world.published is before
    assert sum("reaches no server" in c.reason for c in world.complaints) == 3
    # Nor does it keep a server that the others reach from joining, but for the time to try it.
    told(world, "well", *connected("a", "b", "c", "d"))
    world.start("d")
    world.wait(11.0)
    settle(world)
    assert "d" in world.published.servers


def test_experts_of_unreached_servers_are_held_by_others() -> None:
    world = of("abc", c1=(*connected("a", "b"), cut("c", lost=False)))
    world.notify()
    world.wait(2.0)
    settle(world)
    assert world.published.servers == ("a", "b")
    # It lives, and holds nothing.
    assert not world.stores["c"].any()
    assert [r.refused for r in world.refusals] == ["c"]


def test_another_balancer_gives_nothing_to_a_server_that_is_out_of_reach() -> None:
    world = of("abc", c1=(*connected("a", "b", "c"), cut("d", lost=False)))
    world.start("d")
    for name in "abc":
        experts = int(world.stores[name].sum())
        world.members[name] = replace(world.members[name], experts=experts)
    world.start_balancer()
    settle(world)
    assert world.published.servers == ("a", "b", "c")


def test_a_server_that_was_out_of_reach_gets_nothing_while_the_client_is_away() -> None:
    world = of("abc", c1=(*connected("a", "b", "c"), cut("d", lost=False)))
    world.start("d")
    del world.members["c1"]
    world.wait(100.0)
    settle(world)
    assert not world.stores["d"].any()
    world.members["c2"] = reaching("c2", *connected("a", "b", "c", "d"))
    settle(world)
    assert world.stores["d"].any()


def test_the_first_placement_waits_for_no_client() -> None:
    world = World(2, 2)
    world.members["c1"] = reaching("c1")
    world.start("a")
    world.start("b")
    world.answer_all()
    assert world.published is not None

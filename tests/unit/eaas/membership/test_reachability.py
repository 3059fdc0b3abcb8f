"""Reachability of servers, as shown by status and dashboard."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
from rich.console import Console

from eaas.cluster_snapshot.events import between
from eaas.cluster_snapshot.fold import SnapshotFold
from eaas.cluster_snapshot.model import ClusterSnapshot, Reading
from eaas.membership.reachability import fewest_replicas, unreachable
from eaas.replicas import Replicas
from eaas.types import Member, MemberState, Placement, Role, ServerReach
from eaas_cli.commands.client import status_table

SERVING, DEAD, JOINING = MemberState.SERVING, MemberState.DEAD, MemberState.JOINING
CUT = ServerReach("c", 1, "another user's", lost=False)


def server(name: str, incarnation: int = 1, state: MemberState = SERVING) -> Member:
    return Member(name, Role.EXPERT_SERVER, 1, "h", f"{name}:1", state, incarnation=incarnation)


def client(name: str, *said: ServerReach, state: MemberState = SERVING) -> Member:
    return Member(name, Role.ATTENTION_CLIENT, 1, "h", f"{name}:1", state, 1, reach=said)


def to(*names: str) -> tuple[ServerReach, ...]:
    return tuple(ServerReach(name, 1) for name in names)


# Expert 0 is on a and b, expert 1 on b and c, expert 2 on c alone.
HOLDS_LSE = np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=bool)
PLACEMENT = Placement(
    3, ("a", "b", "c"), HOLDS_LSE, (HOLDS_LSE / HOLDS_LSE.sum(axis=1)).astype(np.float32)
)
SERVERS = (server("a"), server("b"), server("c"))


def fewest(*members: Member) -> list[int]:
    return fewest_replicas(
        Replicas.of(HOLDS_LSE, HOLDS_LSE.astype(np.float32)), ("a", "b", "c"), members
    )[0].tolist()


def test_the_client_with_the_fewest_servers_counts() -> None:
    assert fewest(*SERVERS) == [2, 2, 1]
    well, lost = client("well", *to("a", "b", "c")), client("lost", *to("a", "b"), CUT)
    assert fewest(*SERVERS, well) == [2, 2, 1]
    assert fewest(*SERVERS, well, lost) == [2, 1, 0]
    # A joining client, one of an earlier release, and one that reaches no server.
    joining = replace(lost, state=JOINING)
    former = replace(lost, reach=None)
    nobody = client("nobody", CUT)
    assert fewest(*SERVERS, well, joining, former, nobody) == [2, 2, 1]
    # A connection to an earlier incarnation does not count.
    assert fewest(server("a", 2), *SERVERS[1:], well) == [1, 2, 1]


def test_only_live_members_have_reasons() -> None:
    lost = client("lost", *to("a", "b"), CUT)
    assert unreachable([*SERVERS, lost]) == {"c": {"lost": "another user's"}}
    assert not unreachable([*SERVERS, replace(lost, state=DEAD)])
    assert not unreachable([*SERVERS[:2], server("c", state=DEAD), lost])
    assert not unreachable([*SERVERS[:2], server("c", 2), lost])


def test_snapshots_and_events_show_it() -> None:
    fold = SnapshotFold()

    def look(at: float, *members: Member) -> ClusterSnapshot:
        return fold.take(Reading(at, members=members, placement=PLACEMENT))

    lost = client("lost", *to("a", "b"), CUT)
    before = look(1.0, *SERVERS, client("lost", *to("a", "b", "c")))
    during = look(2.0, *SERVERS, lost)
    found = {m.member.id: m.unreachable for m in during.members}
    assert found == {"a": {}, "b": {}, "c": {"lost": "another user's"}, "lost": {}}
    assert (during.uncovered, during.min_replicas) == (((0, 2),), 0)
    events = between(before, during)
    assert ("unreachable", "c", "cannot be reached by lost: another user's") in [
        (e.kind, e.subject, e.text) for e in events
    ]
    after = look(3.0, *SERVERS, client("lost", *to("a", "b", "c")))
    assert "reachable" in [e.kind for e in between(during, after)]


def test_status_shows_it_in_one_line() -> None:
    row = {"id": "c", "role": "expert-server", "state": "JOINING", "pid": 1, "address": "c:1"}
    row |= {"incarnation": 1, "experts": 0, "in_flight": 0}
    document = {"endpoint": "http://e", "epoch": 3}
    document |= {"coverage": {"uncovered": [], "min_replicas": 2}}
    console = Console(width=160, record=True)
    lost = {"unreachable": MappingProxyType({"client-1": "another user's"})}
    console.print(status_table(document | {"members": [row | lost]}))
    assert "c: unreachable for client-1: another user's" in console.export_text()
    # A dead server has nothing in flight, and other roles have no experts. (An endpoint of an earlier
    # release does not say who is unreachable.)
    for changed, cells in (
        ({"experts": 8, "state": "DEAD"}, ["1", "8", "-"]),
        ({"experts": 0, "role": "balancer"}, ["1", "-", "0"]),
    ):
        console.print(status_table(document | {"members": [row | changed]}))
        assert console.export_text().splitlines()[2].split()[-3:] == cells

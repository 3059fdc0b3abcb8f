"""Each figure of `eaas top`, from a snapshot with different values."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.counters import Counters, Rates
from eaas.cluster_snapshot.loading import Loading
from eaas.cluster_snapshot.model import Event, Load, MemberSnapshot, Source
from eaas.types import Member, MemberState, Placement, Role
from eaas_cli.commands.top_view import COLUMNS, frame

URL = "http://127.0.0.1:8000"


def member(
    name: str,
    state: MemberState = MemberState.SERVING,
    role: Role = Role.EXPERT_SERVER,
    lease_age_s: float = 0.4,
    utilisation: float | None = None,
    **fields: Any,
) -> MemberSnapshot:
    made = Member(name, role, 7, "here", "here:1", state, incarnation=2, **fields)
    return MemberSnapshot(made, lease_age_s, utilisation)


def placement(*nowhere: tuple[int, int]) -> Placement:
    """Each expert on both servers, except the uncovered (layer, expert) pairs."""
    holds_LSE = np.ones((2, 2, 4), np.bool_)
    for layer, expert in nowhere:
        holds_LSE[layer, :, expert] = False
    return Placement(5, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))


def source(name: str, silent_since: float | None = None) -> Source:
    return Source(name, silent_since, "" if silent_since is None else "no answer in time")


FACTS = ClusterSnapshot(
    at=100.0,
    sources=MappingProxyType({n: source(n) for n in ("monitor", "balancer", "endpoint")}),
    members=(
        member("client", role=Role.ATTENTION_CLIENT, in_flight=3),
        member("a", experts=8, utilisation=0.25, in_flight=1),
        member("b", MemberState.SUSPECT, experts=6, utilisation=0.75, lease_age_s=1.7),
    ),
    placement=placement(),
    load=Load(("a", "b"), np.array([[10.0, 30.0], [20.0, 20.0]]), np.ones(2), np.array([1.5, 1.0])),
    par=1.25,
    bound=1.0,
    counters=Counters(running=3.0, waiting=4.0),
    rates=Rates(123.4, 0.045, 0.0125),
    events=(Event(95.0, "suspected", "b", "is SUSPECT"),),
)


def lines(snapshot: ClusterSnapshot, height: int = 40, **how: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=COLUMNS).print(frame(URL, snapshot, height, **how))
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


FRAME = f"""\
{URL}   epoch 5   experts: at least 2 live, on 1 node
tokens/s 123.4   TTFT 45 ms   ITL 12 ms   running 3   waiting 4
PAR 1.25   bound 1.00   gap 1.25

MEMBER                      STATE       LIFE  EXPERTS  BUSY  LOAD  FLIGHT  HEARD
client                      SERVING        2                            3  0.4 s
a                           SERVING        2        8   25%  0.75       1  0.4 s
b                           SUSPECT        2        6   75%  1.25       0  1.7 s

LOAD BY LAYER (full: 2 times the layer's mean)
a                        ▃▅
b                        ▇▅

EVENTS
  5 s ago  b is SUSPECT
"""


def test_a_frame() -> None:
    assert lines(FACTS) == FRAME.splitlines()
    assert (
        lines(FACTS, ascii_only=True) == FRAME.replace("▃▅", ":=").replace("▇▅", "*=").splitlines()
    )


SILENT = MappingProxyType({**FACTS.sources, "balancer": source("balancer", 88.0)})


@pytest.mark.parametrize(
    ("changes", "line", "end"),
    [
        # No number that nobody has told.
        ({"placement": None}, 0, "epoch -   experts: not known yet"),
        ({"rates": Rates(), "counters": None}, 1, "s -   TTFT -   ITL -   running -   waiting -"),
        ({"par": None}, 2, "PAR -   bound 1.00   gap -"),
        ({"placement": placement((1, 2), (1, 3))}, 0, "experts: 2 uncovered (first 1/2)"),
        ({"sources": SILENT}, 2, "balancer unreachable since 12 s"),
        (
            {"members": (member("gone", MemberState.DEAD),), "load": None},
            5,
            "DEAD           2        0     -     -       -      -",
        ),
        ({"load": replace(FACTS.load, speeds_S=np.array([1.0, 0.25]))}, 11, " █▇"),  # type: ignore[type-var]
        ({"events": ()}, -1, "none yet"),
    ],
)
def test_a_changed_line(changes: dict[str, Any], line: int, end: str) -> None:
    assert lines(replace(FACTS, **changes))[line].endswith(end)


def big() -> ClusterSnapshot:
    """64 servers, 60 layers; one is dead, one has most of the load."""
    names = tuple(f"expert-server-{i:02d}" for i in range(64))
    tokens_LS = np.ones((60, 64))
    tokens_LS[:, 17] = 3.0
    states = {3: MemberState.DEAD}
    return replace(
        FACTS,
        members=tuple(member(n, states.get(i, MemberState.SERVING)) for i, n in enumerate(names)),
        load=Load(names, tokens_LS, np.ones(64), np.full(60, 2.9)),
        events=tuple(Event(90.0, "joined", n, "joined") for n in names),
    )


@pytest.mark.parametrize("height", [24, 40, 80])
def test_a_large_cluster_fits_a_small_terminal(height: int) -> None:
    found = lines(big(), height)
    assert len(found) <= height
    assert max(map(len, found)) <= COLUMNS
    shown = {name for line in found for name in re.findall(r"^expert-server-\d\d", line)}
    # Those that need a look are there.
    assert {"expert-server-03", "expert-server-17"} <= shown
    members = [line for line in found if re.match(r"expert-server-\d\d +[A-Z]", line)]
    assert f"and {64 - len(members)} more" in found
    assert any("layers a bar" in line for line in found)


def loading(count: int) -> ClusterSnapshot:
    members = (member(f"server-{i}", MemberState.JOINING) for i in range(count))
    progress = Loading(4 * 10**9, 14 * 10**8, 28e6)
    return replace(FACTS, members=tuple(replace(m, loading=progress) for m in members))


def test_a_load_is_shown_below_the_members() -> None:
    found = lines(loading(2))
    for name in ("server-0", "server-1"):
        assert f"{name} loads 1.4 of 4.0 GB (35 %), 28.0 MB/s, 93 s left" in found
    many = lines(loading(40), 40)
    assert len(many) <= 40
    assert sum(" loads " in line for line in many) == 8
    assert not any(" loads " in line for line in lines(FACTS))

"""An endpoint of a tiny model whose dashboard shows simulated clusters.

`ui_fixture.UiFixture` starts it and chooses the scene.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.harness.worker import commands_from
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.counters import Counters, Rates
from eaas.cluster_snapshot.loading import Loading
from eaas.cluster_snapshot.model import Decision, Event, Load, MemberSnapshot, Point, Source
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.types import Member, MemberState, Placement, Role
from frontend.dashboard.mount import Dashboard
from frontend.dashboard.operator import Operator

PERIOD_S = 0.3  # tests wait for the next poll
_STATES = (MemberState.SERVING, MemberState.JOINING, MemberState.DRAINING, MemberState.SUSPECT)


def cluster(servers: int, layers: int, experts: int, seed: int = 0) -> ClusterSnapshot:
    """Make a snapshot with data for every section. The load depends on the seed."""
    random = np.random.default_rng(seed)
    names = tuple(f"expert-server-{i}" for i in range(servers))
    holds_LSE = np.zeros((layers, servers, experts), np.bool_)
    for expert, replica in itertools.product(range(experts), range(min(2, servers))):
        holds_LSE[:, (expert + replica) % servers, expert] = True
    shares_LSE = (holds_LSE / np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)).astype(
        np.float32
    )
    tokens_LS = random.integers(50, 150, (layers, servers)).astype(np.float64)
    now = time.monotonic()
    members = [MemberSnapshot(_member("monitor", Role.MONITOR), 0.1, 0.0)]
    members += [MemberSnapshot(_member("balancer", Role.BALANCER), 0.3, 0.0)]
    members += [MemberSnapshot(_member(name), random.random(), random.random()) for name in names]
    points = tuple(
        Point(
            now - 300 + i, 1.1 + random.random() / 4, 1.05, Rates(random.random() * 90, 0.2, 0.04)
        )
        for i in range(300)
    )
    return ClusterSnapshot(
        at=now,
        sources={name: Source(name) for name in ("monitor", "balancer", "endpoint")},
        members=tuple(members),
        placement=Placement(3, names, holds_LSE, shares_LSE),
        load=Load(
            names, tokens_LS, np.ones(servers), tokens_LS.max(axis=1) / tokens_LS.mean(axis=1), 120
        ),
        par=1.2,
        bound=1.05,
        counters=Counters(running=2),
        rates=points[-1].rates,
        curve=points,
        events=tuple(Event(now - 5 * i, "rebalance", "balancer", f"moved {i}") for i in range(60)),
        decisions=tuple(
            Decision(i, 0, "drift", "eplb", "moves", "it pays", 1.3, 1.1, 1.05, 7, 3, "")
            for i in range(20, 0, -1)
        ),
        dead_grace_s=30.0,
    )


def _member(
    name: str, role: Role = Role.EXPERT_SERVER, state: MemberState = MemberState.SERVING
) -> Member:
    return Member(name, role, 4321, "elsewhere", "10.0.0.1:50051", state, incarnation=1, experts=64)


def _unreachable(name: str) -> ClusterSnapshot:
    shown = cluster(3, 4, 16)
    source = Source(name, shown.at - 12, "connection refused")
    return replace(shown, sources={**shown.sources, name: source})


def _with_states(shown: ClusterSnapshot, *states: MemberState) -> ClusterSnapshot:
    """Set the states of the expert servers; those that join load experts."""
    others = [m for m in shown.members if m.member.role is not Role.EXPERT_SERVER]
    servers = [m for m in shown.members if m.member.role is Role.EXPERT_SERVER]
    changed = (
        replace(
            m,
            member=replace(m.member, state=state),
            loading=Loading(4 * 10**9, 14 * 10**8, 28e6) if state is MemberState.JOINING else None,
        )
        for m, state in zip(servers, states, strict=True)
    )
    return replace(shown, members=(*others, *changed))


def _with_engines(shown: ClusterSnapshot) -> ClusterSnapshot:
    """Add a frontend and two attention clients, one of which died and lost its requests."""
    engines = (
        replace(_member(name, Role.ATTENTION_CLIENT, state), engine_address="10.0.0.2:50061")
        for name, state in (("attention-client-0", _SERVING), ("attention-client-1", _DEAD))
    )
    added = (*engines, _member("frontend", Role.FRONTEND))
    members = (*shown.members, *(MemberSnapshot(member, 0.2) for member in added))
    counters = Counters(running=2, migrations={"lost": 2.0, "draining": 1.0})
    return replace(shown, members=members, counters=counters)


def _idle(shown: ClusterSnapshot) -> ClusterSnapshot:
    """Leave out what servers have computed and the balancer has decided."""
    assert shown.load is not None
    load = replace(shown.load, tokens_LS=np.zeros_like(shown.load.tokens_LS))
    return replace(shown, load=load, par=None, rates=Rates(0.0), decisions=(), events=())


def _with_incarnation(shown: ClusterSnapshot, incarnation: int) -> ClusterSnapshot:
    """Set the incarnation of all members."""
    members = (replace(m, member=replace(m.member, incarnation=incarnation)) for m in shown.members)
    return replace(shown, members=tuple(members))


def _hostile(texts: list[str]) -> ClusterSnapshot:
    """Make a cluster whose members have these texts in every field that they state."""
    here = socket.gethostname()  # the page checks processes of this host for a pause
    members = [
        MemberSnapshot(replace(_member(text), address=text, node=text, host=here), 0.5)
        for text in texts
    ]
    dead = [
        MemberSnapshot(replace(_member(f"dead {text}", state=MemberState.DEAD), host=text), 5.0)
        for text in texts
    ]
    shown = cluster(2 * len(texts), 4, 16)
    assert shown.placement is not None
    assert shown.load is not None
    names = tuple(m.member.id for m in (*members, *dead))
    return replace(
        shown,
        members=(*shown.members[:2], *members, *dead),
        sources=shown.sources | {"monitor": Source("monitor", shown.at - 12, "".join(texts))},
        placement=Placement.of_replicas(shown.placement.epoch, names, shown.placement.replicas),
        load=replace(shown.load, servers=names),
        events=tuple(Event(shown.at, "dead", text, text) for text in texts),
        decisions=tuple(
            Decision(i, 0, text, text, text, text, 1.3, 1.1, 1.05, 7, 3, text)
            for i, text in enumerate(texts)
        ),
    )


_DEAD, _SERVING = MemberState.DEAD, MemberState.SERVING
SCENES: dict[str, Callable[[], ClusterSnapshot]] = {
    "small": lambda: cluster(3, 4, 16, seed=time.monotonic_ns()),
    "large": lambda: cluster(64, 60, 256, seed=time.monotonic_ns()),
    "monitor": lambda: _unreachable("monitor"),
    "states": lambda: _with_states(cluster(5, 4, 16), *_STATES, _DEAD),
    "engines": lambda: _with_engines(cluster(3, 4, 16)),
    "empty": lambda: ClusterSnapshot(at=time.monotonic()),
    "idle": lambda: _idle(cluster(3, 4, 16)),
    "killed": lambda: _with_states(cluster(3, 4, 16), _SERVING, _DEAD, _SERVING),
    "again": lambda: _with_incarnation(cluster(3, 4, 16), 2),
    "gone": lambda: replace(cluster(3, 4, 16), members=cluster(1, 4, 16).members),
    "joined": lambda: cluster(4, 4, 16),
    "uncovered": lambda: _with_states(cluster(3, 1, 16), _SERVING, _DEAD, _DEAD),
}
"""Scenes by name. Any other name is a JSON list of texts for `_hostile`."""


class Stage:
    """The dashboard's poller: returns the current scene."""

    def __init__(self) -> None:
        self.scene = "small"
        self._polls = threading.Semaphore(0)

    def look(self) -> ClusterSnapshot:
        self._polls.release()
        scene = SCENES.get(self.scene)
        return scene() if scene is not None else _hostile(json.loads(self.scene))

    def show(self, scene: str) -> None:
        """Change the scene. If there are viewers, return when it is drawn."""
        self.scene = scene
        while self._polls.acquire(blocking=False):
            pass
        # One poll of the scene; the next poll begins after it is drawn. Without a viewer there is none.
        for _ in range(2):
            self._polls.acquire(timeout=4 * PERIOD_S)

    def close(self) -> None:
        """Nothing to close."""


def main() -> None:
    from http_box import Box

    arguments = json.loads(sys.argv[1])
    bind_to_launcher()
    stage = Stage()
    dashboard = Dashboard(lambda: stage, Operator(), period_s=PERIOD_S)
    with Box(dashboard=dashboard) as box:
        scenes = commands_from(arguments["control"])
        announce(ready=box.url)
        for scene, reply in scenes:
            stage.show(scene)
            reply(None)


if __name__ == "__main__":
    main()

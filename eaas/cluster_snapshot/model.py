"""Value types of cluster snapshots, for the dashboard and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eaas.cluster_snapshot.counters import Counters, Rates
from eaas.cluster_snapshot.loading import Loading
from eaas.membership.reachability import ANSWERING, fewest_nodes, fewest_replicas
from eaas.types import Member, Placement, Role

__all__ = [
    "ClusterSnapshot",
    "Decision",
    "Event",
    "Load",
    "MemberSnapshot",
    "Point",
    "Reading",
    "Source",
]


@dataclass(frozen=True)
class Load:
    """Load of the expert servers in the balancer's load window.

    Attributes:
        servers: Ids, in the order of axis S.
        tokens_LS: Tokens by MoE layer and server.
        speeds_S: Relative speeds.
        par_L: Peak-to-average ratio of each layer, corrected for speeds; 1 without tokens.
        window_s: Length of the window in seconds.
    """

    servers: tuple[str, ...]
    tokens_LS: npt.NDArray[np.float64]
    speeds_S: npt.NDArray[np.float64]
    par_L: npt.NDArray[np.float64]
    window_s: float = 0.0

    @property
    def par(self) -> float | None:
        """Mean peak-to-average ratio (PAR) of the server loads over the layers; None without tokens."""
        return float(self.par_L.mean()) if self.tokens_LS.any() else None


@dataclass(frozen=True)
class Decision:
    """One decision of the balancer, from its history (`balancer.proto`, HistoryEntry).

    Attributes:
        verdict: "nothing", "shares" or "moves".
        unix_ms: Wall-clock time.
        epoch: Epoch of the resulting placement; 0 without one.
    """

    number: int
    unix_ms: int
    trigger: str
    policy: str
    verdict: str
    reason: str
    par_now: float
    par_then: float
    bound: float
    transit: int
    epoch: int
    given_up: str

    @property
    def is_counted(self) -> bool:
        """Whether `transit` (moved replicas) is known: with verdict "moves", 0 means not counted."""
        return self.verdict != "moves" or self.transit > 0


@dataclass(frozen=True)
class Reading:
    """One reading of monitor, balancer and endpoint. None means not requested, or no answer.

    Attributes:
        at: Monotonic seconds.
        monitor, balancer, endpoint: Why the source did not answer; empty if it did.
        placement: Also None if it has not changed.
        dead_grace_s: Seconds for which the balancer waits for a dead server's return.
        bound: Lower bound of the mean PAR of any placement, from the balancer's last plan.
    """

    at: float
    monitor: str = ""
    balancer: str = ""
    endpoint: str = ""
    members: tuple[Member, ...] | None = None
    placement: Placement | None = None
    dead_grace_s: float | None = None
    load: Load | None = None
    decisions: tuple[Decision, ...] | None = None
    bound: float | None = None
    counters: Counters | None = None


@dataclass(frozen=True)
class Source:
    """Status of a source of readings: the monitor, the balancer or the endpoint.

    Attributes:
        name: "monitor", "balancer" or "endpoint".
        silent_since: Monotonic seconds of the first missing answer; None while it answers.
        why: Last error.
    """

    name: str
    silent_since: float | None = None
    why: str = ""

    def text(self, now: float) -> str:
        """Write "monitor answers" or "monitor unreachable since 5 s", for display."""
        if self.silent_since is None:
            return f"{self.name} answers"
        return f"{self.name} unreachable since {now - self.silent_since:.0f} s"


@dataclass(frozen=True)
class MemberSnapshot:
    """A member of the cluster, and its measurements from two readings.

    Attributes:
        member: As last reported by the monitor.
        lease_age_s: Seconds since its last heartbeat; also rises while the monitor is unreachable.
        utilisation: Share of busy time between the readings; None if unknown.
        unreachable: For expert servers: client id -> why this client cannot reach the server.
        loading: Progress of an expert server's load; None while it loads nothing.
    """

    member: Member
    lease_age_s: float
    utilisation: float | None = None
    unreachable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    loading: Loading | None = None


@dataclass(frozen=True)
class Event:
    """An event in the cluster between two snapshots, for the event list.

    Attributes:
        at: Monotonic seconds.
        kind: "joined", "serving", "draining", "suspected", "dead", "left", "failover", "rebalance",
            "uncovered", "covered", "unreachable" or "reachable".
        subject: The affected member or source.
        text: Description without the subject.
    """

    at: float
    kind: str
    subject: str
    text: str


@dataclass(frozen=True)
class Point:
    """One point of the dashboard's curves; None means unknown."""

    at: float
    par: float | None
    bound: float | None
    rates: Rates


@dataclass(frozen=True)
class ClusterSnapshot:
    """State of the cluster at one moment, for display.

    Attributes:
        at: Monotonic seconds.
        sources: Status of monitor, balancer and endpoint, by name.
        members: Sorted by role and id; includes DEAD and LEFT members that the monitor still lists.
        placement: None before the first one.
        dead_grace_s: Seconds for which the balancer waits for a dead server's return; None if unknown.
        par, bound: Mean PAR of the load, and its lower bound; None if no server has computed for ten seconds
            or the balancer does not answer.
        rates: Rates of the last seconds.
        curve: Oldest first.
        events: Newest first.
        decisions: Newest first; None before the balancer's first answer.
    """

    at: float = 0.0
    sources: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    members: tuple[MemberSnapshot, ...] = ()
    placement: Placement | None = None
    dead_grace_s: float | None = None
    load: Load | None = None
    par: float | None = None
    bound: float | None = None
    counters: Counters | None = None
    rates: Rates = field(default_factory=Rates)
    curve: tuple[Point, ...] = ()
    events: tuple[Event, ...] = ()
    decisions: tuple[Decision, ...] | None = None

    @property
    def gap(self) -> float | None:
        """PAR of the placement divided by its lower bound; None if either is unknown."""
        return self.par / self.bound if self.par and self.bound else None

    @cached_property
    def live_S(self) -> npt.NDArray[np.bool_]:
        """Mask of the placement's servers that answer requests: SERVING, DRAINING or SUSPECT."""
        answering = {m.member.id for m in self.members if m.member.state in ANSWERING}
        servers = self.placement.servers if self.placement is not None else ()
        return np.array([s in answering for s in servers], np.bool_)

    @cached_property
    def live_replicas_LE(self) -> npt.NDArray[np.int64]:
        """Live replicas of each expert, for the attention client that reaches the fewest.

        All statements about coverage use this count.
        """
        if self.placement is None:
            return np.zeros((0, 0), np.int64)
        members = [m.member for m in self.members]
        return fewest_replicas(self.placement.replicas, self.placement.servers, members)

    @cached_property
    def uncovered(self) -> tuple[tuple[int, int], ...]:
        """(MoE layer, logical expert) pairs without a live replica: calls that need them wait, then fail."""
        pairs = zip(*np.nonzero(self.live_replicas_LE == 0), strict=True)
        return tuple((int(layer), int(expert)) for layer, expert in pairs)

    @property
    def min_replicas(self) -> int:
        """Fewest live replicas of any expert; 0 without a placement, or if some expert has none."""
        return int(self.live_replicas_LE.min()) if self.live_replicas_LE.size else 0

    @cached_property
    def min_nodes(self) -> int:
        """Fewest different nodes with live replicas of an expert; 1: the loss of a node uncovers experts."""
        if self.placement is None:
            return 0
        members = [m.member for m in self.members]
        nodes_LE = fewest_nodes(self.placement.replicas, self.placement.servers, members)
        return int(nodes_LE.min()) if nodes_LE.size else 0

    def live(self, role: Role) -> tuple[Member, ...]:
        """Members of a role that are neither DEAD nor LEFT; SUSPECT ones too."""
        return tuple(
            m.member for m in self.members if m.member.role is role and not m.member.state.is_gone
        )

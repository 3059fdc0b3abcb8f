"""What one sees of a cluster: plain values, for a page or a terminal to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eaas.facts.counters import Counters, Rates
from eaas.reach import ANSWERING, fewest_replicas
from eaas.types import Member, Placement, Role

__all__ = [
    "Answer",
    "Decision",
    "Event",
    "Facts",
    "Load",
    "MemberFacts",
    "Point",
    "Reading",
    "Source",
]


@dataclass(frozen=True)
class Load:
    """What expert servers computed in the balancer's window.

    Attributes:
        servers: Ids; index S.
        tokens_LS: Tokens by MoE layer and server.
        speeds_S: Relative speeds.
        par_L: Peak-to-average ratio of each layer, speeds taken into account; 1 without tokens.
        window_s: Length of the window, seconds.
    """

    servers: tuple[str, ...]
    tokens_LS: npt.NDArray[np.float64]
    speeds_S: npt.NDArray[np.float64]
    par_L: npt.NDArray[np.float64]
    window_s: float = 0.0

    @property
    def par(self) -> float | None:
        """Mean over the layers; None where nothing was computed."""
        return float(self.par_L.mean()) if self.tokens_LS.any() else None


@dataclass(frozen=True)
class Decision:
    """One entry of the balancer's history (`balancer.proto`, HistoryEntry).

    Attributes:
        verdict: "nothing", "shares" or "moves".
        unix_ms: Wall clock, for people.
        epoch: Of the placement that came of it; 0: none.
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
        """Whether `transit` is a count: it is 0 where servers came or left, and nobody planned moves."""
        return self.verdict != "moves" or self.transit > 0


@dataclass(frozen=True)
class Answer:
    """Whether somebody answered, and if not, why; an unset field was not asked for."""

    why: str = ""

    @property
    def reached(self) -> bool:
        """It answered."""
        return not self.why


@dataclass(frozen=True)
class Reading:
    """What one look at the cluster brought. None: it was not asked for, or nobody answered.

    Attributes:
        at: Monotonic seconds.
        monitor, balancer, endpoint: Who answered.
        placement: None also where it is the one that was read before.
        dead_grace_s: Seconds for which the balancer awaits a dead server's return.
        bound: Least mean PAR of any placement with these slots, as the balancer planned last.
    """

    at: float
    monitor: Answer = Answer()
    balancer: Answer = Answer()
    endpoint: Answer = Answer()
    members: tuple[Member, ...] | None = None
    placement: Placement | None = None
    dead_grace_s: float | None = None
    load: Load | None = None
    decisions: tuple[Decision, ...] | None = None
    bound: float | None = None
    counters: Counters | None = None


@dataclass(frozen=True)
class Source:
    """One that is asked.

    Attributes:
        name: "monitor", "balancer" or "endpoint".
        silent_since: Monotonic seconds at which it first did not answer; None: it answers.
        why: What was wrong the last time.
    """

    name: str
    silent_since: float | None = None
    why: str = ""

    def text(self, now: float) -> str:
        """For people."""
        if self.silent_since is None:
            return f"{self.name} answers"
        return f"{self.name} unreachable since {now - self.silent_since:.0f} s"


@dataclass(frozen=True)
class MemberFacts:
    """A member, and what is told of it by two looks.

    Attributes:
        member: As the monitor last said.
        lease_age_s: Seconds since its last heartbeat; goes on while the monitor is away.
        utilisation: Share of the time between the looks for which it was at work; None: not known.
        unreachable: Expert servers: why attention clients cannot reach it, by their ids.
    """

    member: Member
    lease_age_s: float
    utilisation: float | None = None
    unreachable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        at: Monotonic seconds.
        kind: "joined", "serving", "draining", "suspected", "dead", "left", "failover", "rebalance",
            "uncovered", "covered", "unreachable" or "reachable".
        subject: Whom or what it happened to.
        text: For people, without the subject.
    """

    at: float
    kind: str
    subject: str
    text: str


@dataclass(frozen=True)
class Point:
    """One moment of the curves; None: not known then."""

    at: float
    par: float | None
    bound: float | None
    rates: Rates


@dataclass(frozen=True)
class Facts:
    """All of it at one moment.

    Attributes:
        at: Monotonic seconds.
        sources: Of the monitor, the balancer and the endpoint, by name.
        members: By role and id, those that are gone included while the monitor lists them.
        placement: None until there is one.
        dead_grace_s: Seconds for which the balancer awaits a dead server's return; None: not known.
        rates: Of the last seconds.
        curve: The oldest first.
        events: The newest first.
        decisions: The newest first; None: the balancer has not been asked yet.
    """

    at: float = 0.0
    sources: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    members: tuple[MemberFacts, ...] = ()
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
        """How far above the bound the load is: PAR by bound; None where either is not known."""
        return self.par / self.bound if self.par and self.bound else None

    @cached_property
    def live_S(self) -> npt.NDArray[np.bool_]:
        """Which of the placement's servers can be asked for what they hold."""
        answering = {m.member.id for m in self.members if m.member.state in ANSWERING}
        servers = self.placement.servers if self.placement is not None else ()
        return np.array([s in answering for s in servers], np.bool_)

    @cached_property
    def live_replicas_LE(self) -> npt.NDArray[np.int64]:
        """Live replicas of each expert, for the client that reaches fewest of them.

        Whatever is said of coverage anywhere comes from this count.
        """
        if self.placement is None:
            return np.zeros((0, 0), np.int64)
        members = [m.member for m in self.members]
        return fewest_replicas(self.placement.holds_LSE, self.placement.servers, members)

    @cached_property
    def uncovered(self) -> tuple[tuple[int, int], ...]:
        """(MoE layer, logical expert) without a live replica."""
        pairs = zip(*np.nonzero(self.live_replicas_LE == 0), strict=True)
        return tuple((int(layer), int(expert)) for layer, expert in pairs)

    @property
    def min_replicas(self) -> int:
        """Live replicas of the expert that has fewest; 0 without a placement."""
        return int(self.live_replicas_LE.min()) if self.live_replicas_LE.size else 0

    def live(self, role: Role) -> tuple[Member, ...]:
        """Members of a role that are not gone."""
        return tuple(
            m.member for m in self.members if m.member.role is role and not m.member.state.is_gone
        )

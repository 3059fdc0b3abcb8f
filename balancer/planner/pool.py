"""The planner's view of the expert servers: which live, can take experts, or may return. In the balancer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import Complain, Process
from balancer.planner.reach import ReachTracker, Verdict
from eaas.net.message_ranges import TRUSTED_EPOCH
from eaas.nodes import node_of
from eaas.types import Member, MemberState, ModelShape, Placement, Role

__all__ = ["EPOCHS_OF_AN_INCARNATION", "ServerPool"]

# States in which a server is given experts. A suspected server keeps its experts and gets no new ones.
_ABLE = (MemberState.JOINING, MemberState.SERVING)
# Attempts to load a share, half a second apart, before a server process counts as unable. The first such
# time is as long as a dead server's grace; each further one is twice as long, up to the limit below.
_ATTEMPTS = 5
_LONGEST_UNABLE_S = 600.0
_NO_LIMIT = 1 << 40
# Each incarnation of the balancer starts its epochs at another thousand, because its predecessor may have
# sent servers an epoch that no member has reported yet, and two placements must never share an epoch.
EPOCHS_OF_AN_INCARNATION = 1000


# The properties that are computed once until something changes that they may depend on.
_CACHED = ("alive", "clients", "willing", "staying", "able", "holders", "reached", "nodes")


class ServerPool:
    """The planner's state of the members; makes no placements. No I/O, no clock: `now` is monotonic seconds.

    Args:
        dead_grace_s: How long to wait for a dead server, or for a client to reconnect to a server. Also the
            first time for which a server that failed to load too often is given nothing.

    Attributes:
        most: Temporary cap on the replicas of a server, whatever its memory.
        digest: Digest of the cluster's model; empty until it is chosen.
        placed: Servers that hold experts in the placement; None before the first placement.
        reach: Verdict on the servers that clients reach, as of the last `pass_time`.
    """

    def __init__(self, dead_grace_s: float) -> None:
        self._dead_grace_s = dead_grace_s
        self._members: Mapping[str, Member] = {}
        self._servers: dict[str, Member] = {}
        # Members that claim an impossible epoch or incarnation.
        self._absurd: dict[str, Member] = {}
        self._complained: set[Process] = set()
        self._dead_since: dict[str, float] = {}
        # Number of processes that started under each name.
        self._births: Counter[str] = Counter()
        self._refused: set[Process] = set()
        self._failures: Counter[Process] = Counter()
        self._backoffs: Counter[Process] = Counter()
        self._unable_until: dict[Process, float] = {}
        # Processes with a damaged copy of the checkpoint.
        self._damaged: set[Process] = set()
        # Servers that are leaving, from `cordon` until they report DRAINING themselves.
        self._leaving: set[Process] = set()
        self.most: dict[str, int] = {}
        self.digest = ""
        self.placed: frozenset[str] | None = None
        self._reach = ReachTracker(dead_grace_s)
        self.reach = Verdict()

    def observe(self, members: Mapping[str, Member], now: float) -> None:
        """Record a new cluster view. `pass_time` then updates what depends on it."""
        self._changed()
        self._absurd = {m.id: m for m in members.values() if not _is_credible(m)}
        # Impossible claims are ignored, because they would use up the epochs.
        self._members = {s: m for s, m in members.items() if s not in self._absurd}
        self._members |= {s: replace(m, epoch=0) for s, m in self._absurd.items()}
        before = self._servers
        self._servers = {m.id: m for m in self._members.values() if m.role is Role.EXPERT_SERVER}
        joining = {s for s, m in self._servers.items() if m.state is MemberState.JOINING}
        self._births.update(
            s for s in joining if s not in before or before[s].state is not MemberState.JOINING
        )
        dead = {s for s, m in self._servers.items() if m.state.is_gone}
        self._dead_since = {s: self._dead_since.get(s, now) for s in sorted(dead)}

    def _changed(self) -> None:
        """Have the cached properties computed anew.

        A roll-out asks for these thousands of times, and each takes time for every server. Callers must not
        change the values.
        """
        for name in _CACHED:
            self.__dict__.pop(name, None)

    def process(self, member: Member) -> Process:
        """Return the identity of a member's process; a restart under the same name gives another one."""
        return (*member.process, self._births[member.id])

    def choose_model(self) -> ModelShape | None:
        """Set the cluster's model to that of most able servers, for the first placement; None: no model."""
        models = [m.model for _, m in sorted(self._servers.items()) if m.state in _ABLE and m.model]
        if not models:
            return None
        counts = Counter(model.digest for model in models)
        self._changed()
        # Ties go to the first server by id.
        self.digest = counts.most_common(1)[0][0]
        return next(model for model in models if model.digest == self.digest)

    @cached_property
    def alive(self) -> dict[str, Member]:
        """Servers of the cluster's model that have neither died nor left, by id."""
        return {
            s: m
            for s, m in sorted(self._servers.items())
            if not m.state.is_gone and self._is_ours(m)
        }

    @cached_property
    def clients(self) -> list[Member]:
        """All attention clients, in any state, also dead ones."""
        return [m for m in self._members.values() if m.role is Role.ATTENTION_CLIENT]

    @cached_property
    def willing(self) -> dict[str, Member]:
        """Servers in `alive` that have not failed to load too often and have no damaged bytes."""
        return {s: m for s, m in self.alive.items() if not self.is_unable(m)}

    @cached_property
    def staying(self) -> dict[str, Member]:
        """Servers in `willing` that are not draining and that clients can reach: they keep their experts."""
        return {
            s: m
            for s, m in self.willing.items()
            if m.state is not MemberState.DRAINING and s not in self.reach.withheld
        }

    @cached_property
    def able(self) -> dict[str, Member]:
        """Servers in `staying` that can be given experts now: they are joining or serving, not suspected."""
        return {s: m for s, m in self.staying.items() if m.state in _ABLE}

    @cached_property
    def holders(self) -> dict[str, Member]:
        """Live servers that have their share, or have not failed to load it too often."""
        return {s: m for s, m in self.alive.items() if m.epoch or not self.is_unable(m)}

    @cached_property
    def reached(self) -> dict[str, Member]:
        """Servers in `holders` that clients reach. An expert on none of them is an orphan."""
        return {s: m for s, m in self.holders.items() if s not in self.reach.withheld}

    def capacity_S(self, servers: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """int64 (S): replicas that servers may hold, over all layers; None: no server states a limit."""
        limits = [min(self._capacity(s), self.most.get(s, _NO_LIMIT)) for s in servers]
        return None if all(n == _NO_LIMIT for n in limits) else np.array(limits, np.int64)

    @cached_property
    def nodes(self) -> dict[str, str]:
        """Nodes of the servers, dead ones too, by id."""
        return {s: node_of(m) for s, m in self._servers.items()}

    @property
    def expert_bytes(self) -> int:
        """Memory of an expert on the servers, in bytes; 0: none of them states it."""
        return max((member.expert_bytes for member in self._servers.values()), default=0)

    def _capacity(self, server_id: str) -> int:
        member = self._servers.get(server_id)
        if member is None or not (member.memory_bytes and member.expert_bytes):
            return _NO_LIMIT
        return member.memory_bytes // member.expert_bytes

    def complaints(self, now: float) -> list[Complain]:
        """Return new complaints, once per process: servers refused, lost connections, impossible claims.

        A server is refused because of another model or because clients do not reach it.
        """
        found = self._reach.complaints(self.reach, now)
        for m in self._servers.values():
            process = self.process(m)
            if (
                not self.digest
                or m.state not in _ABLE
                or self._is_ours(m)
                or process in self._refused
            ):
                continue
            self._refused.add(process)
            what = f"model {m.model.digest[:12]}" if m.model else "no model"
            why = f"it serves {what}, the cluster serves {self.digest[:12]}"
            found.append(Complain(why, refused=m.id))
        for m in self._absurd.values():
            if self.process(m) not in self._complained:
                self._complained.add(self.process(m))
                claim = f"{m.id} claims epoch {m.epoch}, incarnation {m.incarnation}"
                found.append(Complain(f"{claim}: ignored, no balancer gets there"))
        return found

    @property
    def damaged(self) -> set[str]:
        """Servers that had a damaged copy of the checkpoint, by id."""
        return {server_id for server_id, *_ in self._damaged}

    @property
    def highest_epoch(self) -> int:
        """The highest credible epoch that any member reports; a new placement's epoch is above it."""
        return max((m.epoch for m in self._members.values()), default=0)

    @property
    def balancer_incarnation(self) -> int:
        """The balancer's incarnation, as counted by the monitor: decides from which thousand epochs start."""
        incarnations = (
            m.incarnation
            for m in self._members.values()
            if m.role is Role.BALANCER and m.id not in self._absurd
        )
        return max(incarnations, default=1)

    def is_awaited(self, server_id: str, now: float) -> bool:
        """Whether a server is dead but its grace has not ended: repair then leaves it its share."""
        since = self._dead_since.get(server_id)
        return since is not None and now < since + self._dead_grace_s

    def grace_ends(self, server_ids: tuple[str, ...]) -> list[float]:
        """Return when the graces of the dead servers among these end, so that a repair may be due."""
        dead = (s for s in server_ids if s in self._dead_since)
        return [self._dead_since[s] + self._dead_grace_s for s in dead]

    def clients_behind(self, epoch: int, there_was_one: bool) -> bool:
        """Whether a live client may use an older placement, so that servers must still hold it.

        Args:
            epoch: The newest epoch.
            there_was_one: Whether there was an older placement. A client that reports none and does not
                serve yet may just have received it. (A client that serves and reports none never does.)
        """
        return any(
            m.epoch < epoch
            and (m.epoch > 0 or (there_was_one and m.state is not MemberState.SERVING))
            for m in self._members.values()
            if m.role is Role.ATTENTION_CLIENT and not m.state.is_gone
        )

    def cordon(self, server_id: str) -> bool:
        """Mark a server as leaving, unless no other able server would stay; return whether it is marked.

        Only later calls see the mark; experts move once the server itself reports DRAINING.
        """
        leaving = {s for s, m in self.able.items() if self.process(m) in self._leaving}
        if not self.able.keys() - leaving - {server_id}:
            return False
        self._leaving.add(self.process(self.alive[server_id]))
        return True

    def uncordon(self, server_id: str) -> None:
        """Undo `cordon` for a server that the drain call did not reach."""
        self._leaving.difference_update(
            process for process in tuple(self._leaving) if process[0] == server_id
        )

    def count_failure(self, process: Process, now: float, *, timed_out: bool) -> float:
        """Count a server process's failure to answer or load its share; too many make it unable for a time.

        Args:
            process: The process.
            now: Monotonic seconds.
            timed_out: Whether it exceeded its deadline; one such failure is enough.

        Returns:
            Seconds for which the process counts as unable from now on; 0: it may try again.
        """
        self._failures[process] += _ATTEMPTS if timed_out else 1
        if self._failures[process] < _ATTEMPTS:
            return 0.0
        unable_s = min(_LONGEST_UNABLE_S, self._dead_grace_s * 2.0 ** self._backoffs[process])
        self._backoffs[process] += 1
        self._unable_until[process] = now + unable_s
        self._changed()
        del self._failures[process]
        return unable_s

    def mark_damaged(self, process: Process) -> None:
        """Mark a server process as damaged: its bytes differ from the cluster's, so it gets no experts."""
        self._changed()
        self._damaged.add(process)

    def reset_failures(self, process: Process) -> None:
        """Clear the failures of a process that has loaded its share: later ones are counted from 0."""
        self._failures.pop(process, None)
        self._backoffs.pop(process, None)

    def pass_time(self, now: float) -> None:
        """Apply expired timeouts of unable servers and clients' reconnections; begins each `Planner.tick`."""
        over = [process for process, t in self._unable_until.items() if t <= now]
        for process in over:
            del self._unable_until[process]
            self._changed()
        alive, placed = self.alive, self.placed
        if placed is None and self.highest_epoch:
            # This balancer has just started in a serving cluster, so members report where experts are.
            placed = frozenset(s for s, m in alive.items() if m.experts)
        self._reach.observe((m for m in self.clients if self._counts(m)), alive, now)
        before, self.reach = self.reach, self._reach.verdict(placed, now)
        if self.reach != before:
            self._changed()

    def place(self, placement: Placement) -> None:
        """Record which servers hold experts in the published placement; to `reach`, others are newcomers."""
        self.placed = _holding(placement)

    def has_unreached(self, placement: Placement) -> bool:
        """Whether some client does not reach a server that is new in a placement: publication then waits."""
        new = _holding(placement) - (self.placed or frozenset())
        return bool(new & self.reach.withheld)

    @property
    def due_at(self) -> list[float]:
        """Times at which `pass_time` is due without an event, for `Planner.wake_at`."""
        return [*self._unable_until.values(), *self._reach.due_at()]

    def _counts(self, client: Member) -> bool:
        """Whether a client's reach counts: it is alive and has the cluster's model or none yet."""
        return not client.state.is_gone and (client.model is None or self._is_ours(client))

    def is_unable(self, member: Member) -> bool:
        """Whether this process failed to load too often and waits, or has damaged bytes: it is not called."""
        process = self.process(member)
        return process in self._unable_until or process in self._damaged

    def _is_ours(self, member: Member) -> bool:
        return member.model is not None and member.model.digest == self.digest


def _holding(placement: Placement) -> frozenset[str]:
    """Return the servers that a placement gives experts; a placement may list others."""
    holds_S = np.asarray(placement.holds_LSE.any(axis=(0, 2)))
    return frozenset(s for s, holds in zip(placement.servers, holds_S, strict=True) if holds)


def _is_credible(member: Member) -> bool:
    """Whether a member's epoch and incarnation are possible; if not, the pool ignores the claim."""
    incarnation = member.incarnation if member.role is Role.BALANCER else 0
    return max(member.epoch, EPOCHS_OF_AN_INCARNATION * incarnation) <= TRUSTED_EPOCH

"""The expert servers as the planner sees them: who lives, who can be given experts, who is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from balancer.actions import Action, Complain, Life, Refuse
from balancer.reach import ReachTracker, Verdict
from eaas.message_ranges import TRUSTED_EPOCH
from eaas.types import Member, MemberState, ModelShape, Placement, Role

__all__ = ["EPOCHS_OF_A_LIFE", "ServerPool"]

# A server that is suspected keeps what it has, and is given nothing new.
_ABLE = (MemberState.JOINING, MemberState.SERVING)
# Attempts to load a share, half a second between two, before a life of a server counts as unable: for the
# grace of a dead one, then twice as long, and so on, up to this.
_ATTEMPTS = 5
_LONGEST_UNABLE_S = 600.0
_NO_LIMIT = 1 << 40
# Each life of the balancer counts from another thousand on: the one before may have told servers of an
# epoch that nobody has reported yet, and two placements of one epoch are never to be taken for each other.
EPOCHS_OF_A_LIFE = 1000


class ServerPool:
    """Facts about the members, no decisions. No I/O, no clock: `now` is monotonic seconds.

    Args:
        dead_grace_s: How long a dead server's return is waited for, and a client's return to a server; and
            how long one that failed to load too often is left alone, at first.

    Attributes:
        most: Replicas beyond which a server is given none for now, whatever its memory.
        digest: Of the cluster's model; empty until it is chosen.
        placed: Servers that hold experts by the placement; None before the first one.
        reach: What follows from whom the clients reach, as of the last `pass_time`.
    """

    def __init__(self, dead_grace_s: float) -> None:
        self._dead_grace_s = dead_grace_s
        self._members: Mapping[str, Member] = {}
        self._servers: dict[str, Member] = {}
        # Members that claim an epoch or a life which cannot be.
        self._absurd: dict[str, Member] = {}
        self._complained: set[Life] = set()
        self._dead_since: dict[str, float] = {}
        # Processes that began under a name.
        self._births: Counter[str] = Counter()
        self._refused: set[Life] = set()
        self._failures: Counter[Life] = Counter()
        self._verdicts: Counter[Life] = Counter()
        self._unable_until: dict[Life, float] = {}
        # Of servers whose copy of the checkpoint is damaged, by id and by process.
        self.damaged: set[str] = set()
        self._damaged_lives: set[Life] = set()
        # Before they say DRAINING themselves.
        self._told_to_leave: set[Life] = set()
        self.most: dict[str, int] = {}
        self.digest = ""
        self.placed: frozenset[str] | None = None
        self._reach = ReachTracker(dead_grace_s)
        self.reach = Verdict()

    def observe(self, members: Mapping[str, Member], now: float) -> None:
        """The membership changed."""
        self._absurd = {m.id: m for m in members.values() if not _is_credible(m)}
        # Whatever a member claims, epochs are left: what cannot be is as if it had not been said.
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

    def life(self, member: Member) -> Life:
        """Which process of that name it is."""
        return (*member.life, self._births[member.id])

    def choose_model(self) -> ModelShape | None:
        """The model of most servers that could be given experts becomes the cluster's."""
        models = [m.model for _, m in sorted(self._servers.items()) if m.state in _ABLE and m.model]
        if not models:
            return None
        counts = Counter(model.digest for model in models)
        # Among equals the one of the first server by id.
        self.digest = counts.most_common(1)[0][0]
        return next(model for model in models if model.digest == self.digest)

    @property
    def alive(self) -> dict[str, Member]:
        """Servers of the cluster's model that are not gone, by id."""
        return {
            s: m
            for s, m in sorted(self._servers.items())
            if not m.state.is_gone and self._is_ours(m)
        }

    @property
    def clients(self) -> list[Member]:
        """Attention clients, whatever their state."""
        return [m for m in self._members.values() if m.role is Role.ATTENTION_CLIENT]

    @property
    def willing(self) -> dict[str, Member]:
        """Of those the ones that do what they are told: they did not fail to load too often."""
        return {s: m for s, m in self.alive.items() if not self.is_unable(m)}

    @property
    def staying(self) -> dict[str, Member]:
        """Of those the ones that do not leave, and that clients reach."""
        return {
            s: m
            for s, m in self.willing.items()
            if m.state is not MemberState.DRAINING and s not in self.reach.withheld
        }

    @property
    def able(self) -> dict[str, Member]:
        """Of those the ones that can be given experts now: they are not suspected."""
        return {s: m for s, m in self.staying.items() if m.state in _ABLE}

    @property
    def holders(self) -> dict[str, Member]:
        """Live servers that have their share, or are loading it with some hope."""
        return {s: m for s, m in self.alive.items() if m.epoch or not self.is_unable(m)}

    @property
    def reached(self) -> dict[str, Member]:
        """Of those the ones that clients reach."""
        return {s: m for s, m in self.holders.items() if s not in self.reach.withheld}

    def room_S(self, servers: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """Replicas that these may be given, over all layers; None where nobody states a limit."""
        rooms = [min(self._room(s), self.most.get(s, _NO_LIMIT)) for s in servers]
        return None if all(r == _NO_LIMIT for r in rooms) else np.array(rooms, np.int64)

    def _room(self, server_id: str) -> int:
        member = self._servers.get(server_id)
        if member is None or not (member.memory_bytes and member.expert_bytes):
            return _NO_LIMIT
        return member.memory_bytes // member.expert_bytes

    def new_refusals(self, now: float) -> list[Action]:
        """Servers that get no experts, and why: those of another model than the cluster's, or of none (each
        life of one once), and those that clients do not reach.
        """
        refusals: list[Action] = [
            Complain(note.text) if note.server_id is None else Refuse(note.server_id, note.text)
            for note in self._reach.notes(self.reach, now)
        ]
        for m in self._servers.values():
            life = self.life(m)
            if not self.digest or m.state not in _ABLE or self._is_ours(m) or life in self._refused:
                continue
            self._refused.add(life)
            what = f"model {m.model.digest[:12]}" if m.model else "no model"
            why = f"it serves {what}, the cluster serves {self.digest[:12]}"
            refusals.append(Refuse(m.id, why))
        return refusals

    def new_complaints(self) -> list[str]:
        """Members that claim what cannot be; each life of one once."""
        new = [m for m in self._absurd.values() if self.life(m) not in self._complained]
        self._complained |= {self.life(m) for m in new}
        return [
            f"{m.id} claims epoch {m.epoch}, incarnation {m.incarnation}: ignored, no balancer gets there"
            for m in new
        ]

    @property
    def highest_epoch(self) -> int:
        """Of all that any member ever told, and that a balancer can go on from."""
        return max((m.epoch for m in self._members.values()), default=0)

    @property
    def balancer_life(self) -> int:
        """Which life of the balancer this is, as the monitor counts them."""
        lives = (
            m.incarnation
            for m in self._members.values()
            if m.role is Role.BALANCER and m.id not in self._absurd
        )
        return max(lives, default=1)

    def is_awaited(self, server_id: str, now: float) -> bool:
        """Whether a server is dead, and for so short a time that its return is waited for."""
        since = self._dead_since.get(server_id)
        return since is not None and now < since + self._dead_grace_s

    def grace_ends(self, server_ids: tuple[str, ...]) -> list[float]:
        """When the return of those that are dead is no longer waited for."""
        dead = (s for s in server_ids if s in self._dead_since)
        return [self._dead_since[s] + self._dead_grace_s for s in dead]

    def clients_behind(self, epoch: int, there_was_one: bool) -> bool:
        """Whether a live client may use an older placement.

        Args:
            epoch: Of the newest.
            there_was_one: Before it. Then a client that says that it has none, and does not serve yet, may
                have got that a moment ago. (One that serves and names none does not say what it has.)
        """
        return any(
            m.epoch < epoch
            and (m.epoch > 0 or (there_was_one and m.state is not MemberState.SERVING))
            for m in self._members.values()
            if m.role is Role.ATTENTION_CLIENT and not m.state.is_gone
        )

    def let_drain(self, server_id: str) -> bool:
        """Whether a server can be spared; then it does not count when the next one is looked at."""
        leaving = {s for s, m in self.able.items() if self.life(m) in self._told_to_leave}
        if not self.able.keys() - leaving - {server_id}:
            return False
        self._told_to_leave.add(self.life(self.alive[server_id]))
        return True

    def stays_after_all(self, server_id: str) -> None:
        """It could not be told to leave."""
        self._told_to_leave.difference_update(
            life for life in tuple(self._told_to_leave) if life[0] == server_id
        )

    def count_failure(self, life: Life, now: float, *, timed_out: bool) -> float:
        """A life of a server failed to load its share.

        Args:
            life: Whose.
            now: Monotonic seconds.
            timed_out: It took longer than it may: that is not to be waited for once more.

        Returns:
            For how many seconds it counts as unable, if that was once too often; else 0.
        """
        self._failures[life] += _ATTEMPTS if timed_out else 1
        if self._failures[life] < _ATTEMPTS:
            return 0.0
        unable_s = min(_LONGEST_UNABLE_S, self._dead_grace_s * 2.0 ** self._verdicts[life])
        self._verdicts[life] += 1
        self._unable_until[life] = now + unable_s
        del self._failures[life]
        return unable_s

    def is_damaged(self, life: Life) -> None:
        """A life of a server read other bytes than the cluster's: it is given nothing more."""
        self.damaged.add(life[0])
        self._damaged_lives.add(life)

    def forgive(self, life: Life) -> None:
        """It did load one."""
        self._failures.pop(life, None)
        self._verdicts.pop(life, None)

    def pass_time(self, now: float) -> None:
        """Whose time as unable is over is as able as anybody; and clients are waited for no longer."""
        self._unable_until = {life: t for life, t in self._unable_until.items() if t > now}
        alive, placed = self.alive, self.placed
        if placed is None and self.highest_epoch:
            # This balancer has just begun, in a cluster that serves.
            placed = frozenset(s for s, m in alive.items() if m.experts)
        self._reach.observe((m for m in self.clients if self._counts(m)), alive, now)
        self.reach = self._reach.verdict(placed, now)

    def place(self, placement: Placement) -> None:
        """It is published."""
        self.placed = _holding(placement)

    def has_unreached(self, placement: Placement) -> bool:
        """Whether a server that gets its first experts is not reached by all clients."""
        new = _holding(placement) - (self.placed or frozenset())
        return bool(new & self.reach.withheld)

    @property
    def due_at(self) -> list[float]:
        """When that is to be done."""
        return [*self._unable_until.values(), *self._reach.due_at()]

    def _counts(self, client: Member) -> bool:
        """Whether a client lives, and is of the cluster's model."""
        return not client.state.is_gone and (client.model is None or self._is_ours(client))

    def is_unable(self, member: Member) -> bool:
        """Whether this life failed to load its share too often, a short time ago, or has damaged bytes."""
        life = self.life(member)
        return life in self._unable_until or life in self._damaged_lives

    def _is_ours(self, member: Member) -> bool:
        return member.model is not None and member.model.digest == self.digest


def _holding(placement: Placement) -> frozenset[str]:
    """The servers that hold experts."""
    holds_S = np.asarray(placement.holds_LSE.any(axis=(0, 2)))
    return frozenset(s for s, holds in zip(placement.servers, holds_S, strict=True) if holds)


def _is_credible(member: Member) -> bool:
    """Whether a balancer can go on from what a member says of epochs and lives."""
    life = member.incarnation if member.role is Role.BALANCER else 0
    return max(member.epoch, EPOCHS_OF_A_LIFE * life) <= TRUSTED_EPOCH

"""The planner's calls to expert servers: which are due for a placement, and how far each is. No I/O."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from enum import Enum, auto

from balancer.planner.actions import Action, Call, Inspect, Prepare, Process, Retire
from balancer.planner.digests import ExpertDigests
from balancer.planner.pool import ServerPool
from eaas.types import Member, MemberState, Placement

__all__ = ["Calls"]

_Key = tuple[type[Call], Process, int]


class _State(Enum):
    """How far a call is; a call without a state has not begun."""

    BEGUN = auto()
    AWAITS_DIGESTS = auto()
    """A Prepare: the server has loaded its share, and waits for digests to compare it with."""
    FAILED = auto()
    """A Retire that is retried, while the roll-out goes on."""
    DONE = auto()
    """It is not sent again, and no stage waits for it."""


class Calls:
    """Makes the calls due for a placement, and tracks each by kind, server process and epoch.

    Args:
        pool: The servers.
        digests: The experts' digests.
    """

    def __init__(self, pool: ServerPool, digests: ExpertDigests) -> None:
        self._pool = pool
        self._digests = digests
        self._states: dict[_Key, _State] = {}

    # -- outcomes -------------------------------------------------------------------------------

    def begin(self, calls: Iterable[Call]) -> list[Action]:
        """Mark calls as begun; return those that had not begun before, for `Rollout` to send."""
        new = [call for call in calls if _key(call) not in self._states]
        self._states.update((_key(call), _State.BEGUN) for call in new)
        return list(new)

    def succeeded(self, call: Call) -> None:
        """Mark a call as succeeded, or as not needed: it is not begun again, and no stage waits for it."""
        self._states[_key(call)] = _State.DONE

    def loaded(self, call: Prepare) -> None:
        """Record that a server has loaded its share and waits for digests; `decide_digests` ends the wait."""
        self._states[_key(call)] = _State.AWAITS_DIGESTS

    def stop_waiting(self, call: Retire) -> None:
        """Mark a failed call as no longer waited for: the roll-out goes on, and the call is still retried."""
        self._states[_key(call)] = _State.FAILED

    def ask_again(self, processes: Container[Process]) -> None:
        """Let the unfinished calls of server processes begin again."""
        for key, state in tuple(self._states.items()):
            if key[1] in processes and state is not _State.DONE:
                del self._states[key]

    def keep(self, epoch: int) -> None:
        """Forget the calls of all other epochs, because this one was published."""
        self._states = {key: state for key, state in self._states.items() if key[-1] == epoch}

    # -- loads ----------------------------------------------------------------------------------

    def prepare(self, placement: Placement, layer_order: tuple[int, ...]) -> list[Action]:
        """Return the Prepare calls to send: to servers that have not received one for this placement."""
        calls: list[Call] = []
        for server in self._servers(placement):
            where = server.id, self._pool.process(server), server.address
            call = Prepare(*where, placement, layer_order, self._digests.known_LE)
            if server.state is MemberState.SERVING and server.epoch == placement.epoch:
                # A server that lost only its lease still has its weights.
                self.succeeded(call)
            calls.append(call)
        return self.begin(calls)

    def is_prepared(self, placement: Placement) -> bool:
        """Whether every server of the placement that can load has its share: it may be published."""
        return not any(self._unprepared(placement))

    def decide_digests(self, placement: Placement) -> None:
        """Decide digests once all servers of the placement have stated theirs; Prepare is then sent again."""
        unprepared = {*self._unprepared(placement)}
        states = {self._states.get((Prepare, p, placement.epoch)) for p in unprepared}
        if states == {_State.AWAITS_DIGESTS}:
            self._digests.decide(unprepared)
            self.ask_again(unprepared)

    def _unprepared(self, placement: Placement) -> Iterator[Process]:
        processes = (self._pool.process(server) for server in self._servers(placement))
        return (process for process in processes if not self._is_done(Prepare, process, placement))

    def _servers(self, placement: Placement) -> list[Member]:
        """Return a placement's servers, without those that cannot load for now."""
        servers = frozenset(placement.servers)
        return [m for s, m in self._pool.willing.items() if s in servers]

    # -- unloads --------------------------------------------------------------------------------

    def retire(self, placement: Placement) -> list[Action]:
        """Return the Retire calls to send, once each: to servers that have their share or that get none."""
        servers = frozenset(placement.servers)
        return self.begin(
            Retire(m.id, process, m.address, placement)
            for m, process in self._retirable(placement)
            if m.id not in servers or self._is_done(Prepare, process, placement)
        )

    def is_retired(self, placement: Placement) -> bool:
        """Whether servers hold nothing but their shares, or do not answer Retire: the roll-out is over."""
        calls = ((Retire, process, placement.epoch) for _, process in self._retirable(placement))
        return all(self._states.get(call) in (_State.DONE, _State.FAILED) for call in calls)

    def unretired(self, placement: Placement) -> dict[str, int]:
        """Return the servers that may hold more than their shares, as Retire has not reached them.

        By server: the replicas of its share. It gets no more for now.
        """
        count_S = placement.holds_LSE.sum(axis=(0, 2)).tolist()
        known = dict(zip(placement.servers, count_S, strict=True))
        return {
            m.id: known.get(m.id, 0)
            for m, process in self._retirable(placement)
            if not self._is_done(Retire, process, placement)
        }

    def _is_done(self, kind: type[Call], process: Process, placement: Placement) -> bool:
        return self._states.get((kind, process, placement.epoch)) is _State.DONE

    def _retirable(self, placement: Placement) -> list[tuple[Member, Process]]:
        """Return live servers that hold experts of this placement or of an older one."""
        servers = frozenset(placement.servers)
        return [
            (m, self._pool.process(m))
            for s, m in self._pool.willing.items()
            if s in servers or m.state is not MemberState.JOINING
        ]


def _key(call: Call) -> _Key:
    return (type(call), call.process, 0 if isinstance(call, Inspect) else call.placement.epoch)

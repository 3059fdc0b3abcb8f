"""State of the planner's calls to expert servers: begun, succeeded, or not waited for. No I/O."""

from __future__ import annotations

from collections.abc import Container, Iterable

from balancer.planner.actions import Action, Call, Inspect, Life

__all__ = ["Ledger"]

_Key = tuple[type[Call], Life, int]


class Ledger:
    """Tracks the planner's calls by kind, server process and epoch (0 for an inspection)."""

    def __init__(self) -> None:
        # Calls that have begun; that have succeeded; that failed and are retried, but not waited for.
        self._asked: set[_Key] = set()
        self._done: set[_Key] = set()
        self._vain: set[_Key] = set()

    def begin(self, calls: Iterable[Call]) -> list[Action]:
        """Mark calls as begun; return those that had not begun before, for `Rollout` to send."""
        new = [call for call in calls if _key(call) not in self._asked]
        self._asked.update(_key(call) for call in new)
        return list(new)

    def succeeded(self, call: Call) -> None:
        """Mark a call as succeeded, or as not needed: it is not begun again, and no stage waits for it."""
        self._asked.add(_key(call))
        self._done.add(_key(call))

    def in_vain(self, call: Call) -> None:
        """Mark a failed call as no longer waited for: the roll-out goes on, and the call is still retried."""
        self._vain.add(_key(call))

    def is_begun(self, kind: type[Call], life: Life, epoch: int) -> bool:
        """Whether a call to a server process has begun or was not needed: `begin` would not return it."""
        return (kind, life, epoch) in self._asked

    def is_done(self, kind: type[Call], life: Life, epoch: int) -> bool:
        """Whether a call to a server process has succeeded or was not needed."""
        return (kind, life, epoch) in self._done

    def is_over(self, kind: type[Call], life: Life, epoch: int) -> bool:
        """Whether the roll-out may go on without a call: it has succeeded or is no longer waited for."""
        key = (kind, life, epoch)
        return key in self._done or key in self._vain

    def ask_again(self, lives: Container[Life]) -> None:
        """Let the unfinished calls of server processes begin again: the next `begin` returns them."""
        self._asked = {key for key in self._asked if key[1] not in lives or key in self._done}

    def keep(self, epoch: int) -> None:
        """Forget the calls of all other epochs, because this one was published."""
        for keys in (self._asked, self._done, self._vain):
            keys.intersection_update({key for key in keys if key[-1] == epoch})


def _key(call: Call) -> _Key:
    return (type(call), call.life, 0 if isinstance(call, Inspect) else call.placement.epoch)

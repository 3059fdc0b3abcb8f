"""Which calls to servers were begun, and what became of them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from balancer.actions import Action, Call, Inspect, Life

__all__ = ["Ledger"]

_Key = tuple[type[Call], Life, int]


class Ledger:
    """A call is known by its kind, the life of its server, and its epoch (0 for an inspection)."""

    def __init__(self) -> None:
        # Begun, succeeded, and failed but tried on.
        self._asked: set[_Key] = set()
        self._done: set[_Key] = set()
        self._vain: set[_Key] = set()

    def begin(self, calls: Iterable[Call]) -> list[Action]:
        """Those that were not begun before; from now on they were."""
        new = [call for call in calls if _key(call) not in self._asked]
        self._asked.update(_key(call) for call in new)
        return list(new)

    def succeeded(self, call: Call) -> None:
        """It did what it was told."""
        self._asked.add(_key(call))
        self._done.add(_key(call))

    def in_vain(self, call: Call) -> None:
        """It did not, and nobody waits for it; it is tried on."""
        self._vain.add(_key(call))

    def is_done(self, kind: type[Call], life: Life, epoch: int) -> bool:
        """Whether a server did that."""
        return (kind, life, epoch) in self._done

    def is_over(self, kind: type[Call], life: Life, epoch: int) -> bool:
        """The same, or it is not waited for."""
        return (kind, life, epoch) in self._done | self._vain

    def ask_again(self, life: Life) -> None:
        """Whatever a server has not done is to be begun anew."""
        self._asked = {key for key in self._asked if key[1] != life or key in self._done}

    def keep(self, epoch: int) -> None:
        """What was said of other epochs matters no more."""
        for keys in (self._asked, self._done, self._vain):
            keys.intersection_update({key for key in keys if key[-1] == epoch})


def _key(call: Call) -> _Key:
    return (type(call), call.life, 0 if isinstance(call, Inspect) else call.placement.epoch)

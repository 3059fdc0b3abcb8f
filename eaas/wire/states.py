"""Slot states and transitions, as pure data (table: `eaas.wire.slot`)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["TRANSITIONS", "Action", "SlotState", "next_state"]


class SlotState(enum.IntEnum):
    """Value of a slot's flag."""

    FREE = 0
    WRITTEN = 1
    DONE = 2
    OFFLINE = 3

    @property
    def mask(self) -> int:
        """Mask of this state for `Flags.scan` and `Flags.wait`."""
        return 1 << self


class Action(enum.Enum):
    """A transition of a slot; the name starts with the side that may do it."""

    CLIENT_WRITE_DONE = enum.auto()
    CLIENT_FREE = enum.auto()
    SERVER_DONE = enum.auto()
    SERVER_OFFLINE = enum.auto()
    SERVER_RECLAIM = enum.auto()


TRANSITIONS: Mapping[tuple[SlotState, Action], SlotState] = MappingProxyType(
    {
        (SlotState.FREE, Action.CLIENT_WRITE_DONE): SlotState.WRITTEN,
        (SlotState.WRITTEN, Action.SERVER_DONE): SlotState.DONE,
        (SlotState.DONE, Action.CLIENT_FREE): SlotState.FREE,
        (SlotState.FREE, Action.SERVER_OFFLINE): SlotState.OFFLINE,
        (SlotState.WRITTEN, Action.SERVER_OFFLINE): SlotState.OFFLINE,
        (SlotState.DONE, Action.SERVER_OFFLINE): SlotState.OFFLINE,
        (SlotState.OFFLINE, Action.SERVER_OFFLINE): SlotState.OFFLINE,
        (SlotState.OFFLINE, Action.SERVER_RECLAIM): SlotState.FREE,
    }
)
"""All transitions; `Arena` derives its compare-and-exchange operations from this table."""


def next_state(state: SlotState, action: Action) -> SlotState | None:
    """The state after an action; None if the action is not allowed."""
    return TRANSITIONS.get((state, action))

"""The data path between client and expert server: an arena of slots, their bytes and states."""

from eaas.wire.arena import Arena
from eaas.wire.slot import RequestHeader, ResultHeader, SlotState

__all__ = ["Arena", "RequestHeader", "ResultHeader", "SlotState"]

"""What client and server share: the slots of an arena, their bytes and their states."""

from eaas.wire.arena import Arena
from eaas.wire.slot import RequestHeader, ResultHeader, SlotState

__all__ = ["Arena", "RequestHeader", "ResultHeader", "SlotState"]

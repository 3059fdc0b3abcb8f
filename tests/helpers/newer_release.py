"""`python -m newer_release`: the `eaas` program of a later release, as far as this one meets it.

RELEASE=minor: what it sends has fields that this release does not know.
RELEASE=major: it speaks the next version of the control plane's contract.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import eaas.session
from eaas.types import Member

# Field 1000, a varint of 1.
UNKNOWN = b"\xc0\x3e\x01"


def _adding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def add(*arguments: Any) -> Any:
        message = plain(*arguments)
        message.MergeFromString(UNKNOWN)
        return message

    return add


def _minor() -> None:
    Member.to_proto = _adding(Member.to_proto)
    eaas.session.MemberSession._heartbeat = _adding(eaas.session.MemberSession._heartbeat)
    if sys.argv[1] == "expert-server":
        from expert_server.placements import PlacementHandler
        from expert_server.service import ExpertService

        for owner, name in ((ExpertService, "Connect"), (PlacementHandler, "PreparePlacement")):
            setattr(owner, name, _adding(getattr(owner, name)))


def _major() -> None:
    eaas.session.PROTOCOL_VERSION += 1


if __name__ == "__main__":
    {"minor": _minor, "major": _major}[os.environ["RELEASE"]]()
    from eaas.cli import main as program

    program()

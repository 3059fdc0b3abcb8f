"""`python -m newer_release`: the `eaas` program of a later release, as far as this one meets it.

RELEASE=minor: what it sends has fields that this release does not know.
RELEASE=major: it speaks another version of the control plane's contract, and no longer this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import eaas.session
from eaas import versions
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
    later = versions.CONTROL_PLANE.newest + 1
    versions.CONTROL_PLANE = versions.Versions(later, later)


if __name__ == "__main__":
    {"minor": _minor, "major": _major}[os.environ["RELEASE"]]()
    from eaas.cli import main as program

    program()

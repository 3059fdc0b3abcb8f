"""What clients say of servers, and when that makes a server SUSPECT though its heartbeat lives. Pure.

Terms:
  word: what one client last said of one life of a server. It is *bad* while requests have failed since the
    last one that was answered, else *good*.
  recent: a good word for a short time, since a client that stopped asking knows nothing; a bad one for a long
    time, since whoever gets no answers stops asking for a while.
  accused: a server of which all recent words are bad. One client that is cut off from a server
    which answers others accuses nobody.

    not accused ---- all recent words have been bad for `patience_s` ---------------> accused
        ^            (and `memory_s` have passed since it was last cleared)              |
        +------------ a good word, or no bad one is recent any more ---------------------+
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["OutcomeBook", "Said"]

# Of a lease. A client speaks with every heartbeat, so within the first it has taken back what was only a
# moment's trouble.
_PATIENCE_SHARE = 0.75
_WINDOW_SHARE = 2.0
_MEMORY_SHARE = 10.0


@dataclass(frozen=True)
class Said:
    """A client's totals about one life of a server.

    Attributes:
        outcomes: Requests that ended, in whatever way; rises from report to report.
        answered: Those with a result.
        failures_since_answer: Those that failed since.
    """

    outcomes: int
    answered: int
    failures_since_answer: int


@dataclass(frozen=True)
class _Word:
    said: Said
    heard_at: float
    # Since when there has been no answer; None: the word is good.
    bad_since: float | None


@dataclass
class _Case:
    words: dict[str, _Word] = field(default_factory=dict)
    accusation: str | None = None
    cleared_at: float = -math.inf


class OutcomeBook:
    """The words about live servers by live clients; the owner says who is gone (`forget`).

    Args:
        lease_s: What the other times are made of.
    """

    def __init__(self, lease_s: float) -> None:
        self.patience_s = _PATIENCE_SHARE * lease_s
        self.window_s = _WINDOW_SHARE * lease_s
        self.memory_s = _MEMORY_SHARE * lease_s
        self._cases: dict[str, _Case] = {}
        # Those with a recent bad word: an accusation of no other comes or goes with the time.
        self._open: dict[str, None] = {}

    def __len__(self) -> int:
        """Words that are kept: at most one for each client and server."""
        return sum(len(case.words) for case in self._cases.values())

    def take(self, server_id: str, client_id: str, said: Said, now: float) -> None:
        """A client reports. What is not newer than what it said before changes nothing."""
        words = self._cases.setdefault(server_id, _Case()).words
        known = words.get(client_id)
        if known is not None and said.outcomes <= known.said.outcomes:
            return
        bad_since = None
        if said.failures_since_answer:
            bad_since = now
            if known is not None and said.answered == known.said.answered:
                bad_since = now if known.bad_since is None else known.bad_since
            self._open[server_id] = None
        words[client_id] = _Word(said, now, bad_since)

    def open_cases(self) -> tuple[str, ...]:
        """The servers whose `accusation` may change with the time."""
        return tuple(self._open)

    def accusation(self, server_id: str, now: float) -> str | None:
        """Why a server is suspected, for people; None where it is not. Time passes only by this call."""
        case = self._cases.get(server_id)
        if case is None:
            return None
        bad = [
            word.bad_since
            for word in case.words.values()
            if word.bad_since is not None and now - word.heard_at < self.memory_s
        ]
        good = any(
            word.bad_since is None and now - word.heard_at < self.window_s
            for word in case.words.values()
        )
        if good or not bad:
            if case.accusation is not None:
                case.accusation, case.cleared_at = None, now
            if not bad:
                self._open.pop(server_id, None)
        elif (
            case.accusation is None
            and now - max(bad) >= self.patience_s
            and now - case.cleared_at >= self.memory_s
        ):
            clients = "client gets" if len(bad) == 1 else "clients get"
            case.accusation = f"{len(bad)} of {len(bad)} {clients} no answers"
        return case.accusation

    def skip(self, seconds: float) -> None:
        """So long nobody was heard, because the monitor itself was paused: as if the time had not passed."""
        for case in self._cases.values():
            case.cleared_at += seconds
            for client_id, word in case.words.items():
                bad_since = None if word.bad_since is None else word.bad_since + seconds
                case.words[client_id] = _Word(word.said, word.heard_at + seconds, bad_since)

    def forget(self, member_id: str) -> None:
        """A life has ended, of a server or of a client: what was said of it, and what it said."""
        self._cases.pop(member_id, None)
        self._open.pop(member_id, None)
        for case in self._cases.values():
            case.words.pop(member_id, None)

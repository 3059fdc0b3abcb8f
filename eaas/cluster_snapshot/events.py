"""For dashboard and `eaas top`: derives events (joined, dead, failover, ...) from two snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eaas.cluster_snapshot.model import ClusterSnapshot, Decision, Event
from eaas.counted import counted
from eaas.types import Member, MemberState

__all__ = ["between"]

_KINDS = {
    MemberState.SERVING: ("serving", "serves"),
    MemberState.DRAINING: ("draining", "is leaving: others take its experts over"),
    # A suspected member is late, stuck, or does not answer its clients. The monitor's log names the cause.
    MemberState.SUSPECT: ("suspected", "is SUSPECT"),
    MemberState.DEAD: ("dead", "is DEAD"),
    MemberState.LEFT: ("left", "has left"),
    MemberState.JOINING: ("joined", "joins"),
}


def between(before: ClusterSnapshot, after: ClusterSnapshot) -> tuple[Event, ...]:
    """List the events between two snapshots of the cluster; none for the first snapshot."""
    if not before.sources:
        return ()
    return tuple(
        Event(after.at, kind, subject, text)
        for events in (
            _sources(before, after),
            _members(before, after),
            _coverage(before, after),
            _failovers(before, after),
            _decisions(before.decisions, after.decisions),
        )
        for kind, subject, text in events
    )


def _sources(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[str, str, str]]:
    for name, source in after.sources.items():
        was_silent = before.sources[name].silent_since is not None
        if source.silent_since is not None and not was_silent:
            yield "unreachable", name, f"does not answer: {source.why}"
        elif source.silent_since is None and was_silent:
            yield "reachable", name, "answers again"


def _members(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[str, str, str]]:
    # The monitor's first answer causes no events.
    if not before.members:
        return
    yield from _reach(before, after)
    known = {m.member.id: m.member for m in before.members}
    for member in (m.member for m in after.members):
        old = known.pop(member.id, None)
        if old is None or old.incarnation != member.incarnation:
            yield "joined", member.id, f"joined (life {member.incarnation}, pid {member.pid})"
            if member.state is not MemberState.JOINING:
                yield _state(member)
        elif old.state is not member.state:
            yield _state(member)
    for old in known.values():
        if not old.state.is_gone:
            yield "dead", old.id, "has left"


def _reach(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[str, str, str]]:
    known = {m.member.id: m.unreachable for m in before.members}
    for m in after.members:
        old = known.get(m.member.id, {})
        for client in m.unreachable.keys() - old.keys():
            yield (
                "unreachable",
                m.member.id,
                f"cannot be reached by {client}: {m.unreachable[client]}",
            )
        if m.member.state is not MemberState.DEAD:
            for client in old.keys() - m.unreachable.keys():
                yield "reachable", m.member.id, f"is no longer out of reach for {client}"


def _state(member: Member) -> tuple[str, str, str]:
    kind, text = _KINDS[member.state]
    return kind, member.id, text


def _coverage(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[str, str, str]]:
    if after.uncovered and not before.uncovered:
        layer, expert = after.uncovered[0]
        count = len(after.uncovered)
        yield "uncovered", "experts", f"{count} without a live replica (first: {layer}/{expert})"
    elif before.uncovered and not after.uncovered:
        yield "covered", "experts", "all have a live replica again"


def _failovers(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[tuple[str, str, str]]:
    if before.counters is None or after.counters is None:
        return
    for reason, count in _more(before.counters.failovers, after.counters.failovers):
        parts = "1 part of a layer call" if count == 1 else f"{count} parts of layer calls"
        yield "failover", "endpoint", f"{parts} sent to another replica ({reason})"
    for reason, count in _more(before.counters.migrations, after.counters.migrations):
        requests = f"{counted(count, 'request')} {'moves' if count == 1 else 'move'}"
        yield "failover", "endpoint", f"{requests} to another attention client ({reason})"


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    for reason, total in after.items():
        if total > before.get(reason, 0.0):
            yield reason, round(total - before.get(reason, 0.0))


def _decisions(
    before: tuple[Decision, ...] | None, after: tuple[Decision, ...] | None
) -> Iterator[tuple[str, str, str]]:
    # Decisions in the balancer's first answer are from before the snapshots.
    if before is None or after is None:
        return
    newest = max((d.number for d in before), default=0)
    if max((d.number for d in after), default=0) < newest:
        # A restarted balancer counts from 1 again.
        newest = 0
    for decision in reversed(after):
        if decision.number > newest:
            yield "rebalance", "balancer", decision_text(decision)


def moved(replicas: int) -> str:
    """Write "1 replica moves" or "2 replicas move", for the text of a balancer's decision."""
    return f"{counted(replicas, 'replica')} {'moves' if replicas == 1 else 'move'}"


def decision_text(decision: Decision) -> str:
    """Describe a balancer's decision, its reason and effect on PAR in one line, for the event list."""
    change = f"PAR {decision.par_now:.2f} to {decision.par_then:.2f}" if decision.par_now else ""
    moves = moved(decision.transit) if decision.is_counted else "the experts are placed"
    what = {
        "moves": moves,
        "shares": "other shares, nothing moves",
    }.get(decision.verdict, "nothing changes")
    # "... are placed for the servers ..."
    why = (": " if decision.is_counted else " ") + decision.reason if decision.reason else ""
    given_up = f" Given up: {decision.given_up}" if decision.given_up else ""
    return ", ".join(filter(None, (f"{decision.trigger}: {what}", change))) + why + given_up

"""For dashboard and `eaas top`: folds readings of monitor, balancer and endpoint. No I/O, no clock."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from eaas.cluster_snapshot.counters import Counters, Rates, rates
from eaas.cluster_snapshot.events import between
from eaas.cluster_snapshot.loading import Loading, LoadingFold
from eaas.cluster_snapshot.model import ClusterSnapshot, MemberSnapshot, Point, Reading, Source
from eaas.membership.reachability import unreachable
from eaas.types import Member

__all__ = ["SnapshotFold"]

# Limits on the number of events, and of points of the curves.
_EVENTS = 200
_POINTS = 300
# Interval of the rates, long enough for slow tokens. After a longer pause rates and curves start again. PAR
# needs work in this interval: the balancer's window keeps the last steps that had tokens, however old.
_RATES_S = 10.0


class SnapshotFold:
    """Folds readings into snapshots; keeps the last answer of a source that stops answering."""

    def __init__(self) -> None:
        self.snapshot = ClusterSnapshot()
        self._heard_at = 0.0
        self._computed_at = -math.inf
        self._bound: float | None = None
        self._members: tuple[Member, ...] = ()
        self._busy: dict[tuple[str, int], tuple[float, float, float | None]] = {}
        self._loads = LoadingFold()
        self._loading: Mapping[str, Loading] = {}
        self._counters: deque[tuple[float, Counters]] = deque()
        self._curve: deque[Point] = deque(maxlen=_POINTS)

    def take(self, reading: Reading) -> ClusterSnapshot:
        """Fold in the newest reading; return the new snapshot, with events since the one before."""
        before, now = self.snapshot, reading.at
        if now - before.at > _RATES_S:
            self._counters.clear()
            self._curve.clear()
        if reading.members is not None:
            self._heard_at = now
            self._members = tuple(sorted(reading.members, key=_sort_key))
        placement = reading.placement or before.placement
        load = reading.load or before.load
        self._bound = reading.bound if reading.bound is not None else self._bound
        members = self._member_snapshots(now, fresh=reading.members is not None)
        if reading.members is not None and any(m.utilisation for m in members):
            self._computed_at = now
        par = bound = None
        if load is not None and not reading.balancer and now - self._computed_at <= _RATES_S:
            par, bound = load.par, self._bound
        pace = self._rates(now, reading.counters)
        self._curve.append(Point(now, par, bound, pace))
        snapshot = ClusterSnapshot(
            at=now,
            sources=_sources(before.sources, reading),
            members=members,
            placement=placement,
            dead_grace_s=reading.dead_grace_s or before.dead_grace_s,
            load=load,
            par=par,
            bound=bound,
            counters=reading.counters or before.counters,
            rates=pace,
            curve=tuple(self._curve),
            decisions=before.decisions if reading.decisions is None else reading.decisions,
        )
        # Newest first.
        events = (*reversed(between(before, snapshot)), *before.events)[:_EVENTS]
        self.snapshot = replace(snapshot, events=events)
        return self.snapshot

    def _member_snapshots(self, now: float, *, fresh: bool) -> tuple[MemberSnapshot, ...]:
        found = []
        cut = unreachable(self._members)
        if fresh:
            self._loading = self._loads.take(self._members, now)
        for member in self._members:
            heard_at = self._heard_at - member.silence_s
            # `busy_s` is from the last heartbeat.
            if fresh:
                self._measure_utilisation(member, heard_at)
            share = self._busy.get((member.id, member.incarnation), (0.0, 0.0, None))[2]
            if member.state.is_gone:
                share = None
            reasons = MappingProxyType(cut.get(member.id, {}))
            loading = self._loading.get(member.id)
            found.append(MemberSnapshot(member, now - heard_at, share, reasons, loading))
        if fresh:
            known = {(m.id, m.incarnation) for m in self._members}
            self._busy = {key: value for key, value in self._busy.items() if key in known}
        return tuple(found)

    def _measure_utilisation(self, member: Member, heard_at: float) -> None:
        key = member.id, member.incarnation
        then, busy_s, share = self._busy.get(key, (heard_at, member.busy_s, None))
        # Two readings between the same heartbeats differ by rounding only.
        if heard_at - then > 0.2:
            share = min(1.0, max(0.0, (member.busy_s - busy_s) / (heard_at - then)))
            then, busy_s = heard_at, member.busy_s
        self._busy[key] = then, busy_s, share

    def _rates(self, now: float, counters: Counters | None) -> Rates:
        if counters is None:
            self._counters.clear()
            return Rates()
        self._counters.append((now, counters))
        while len(self._counters) > 2 and self._counters[1][0] <= now - _RATES_S:
            self._counters.popleft()
        then, first = self._counters[0]
        return rates(first, counters, now - then)


def _sort_key(member: Member) -> tuple[str, list[tuple[int, str]], str]:
    """Sort key for members: by role, then by id with numbers in natural order; independent of the state."""
    parts = re.findall(r"[0-9]+|[^0-9]+", member.id)
    natural = [(int(p), "") if p[0] in "0123456789" else (-1, p) for p in parts]
    return member.role.value, natural, member.id


def _sources(before: Mapping[str, Source], reading: Reading) -> Mapping[str, Source]:
    sources = {}
    for name in ("monitor", "balancer", "endpoint"):
        why = getattr(reading, name)
        since = before[name].silent_since if name in before else None
        since = reading.at if since is None else since
        sources[name] = Source(name, since, why) if why else Source(name)
    return MappingProxyType(sources)

"""`eaas chaos run`: a cluster, a load, faults; then what was found."""

from __future__ import annotations

import heapq
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaas.bench.worker import nursing
from eaas.chaos.census import census, still_running
from eaas.chaos.check import check, may_be_warm_up
from eaas.chaos.cluster import ChaosCluster
from eaas.chaos.copies import damaged_copy
from eaas.chaos.faults import Faults, Steps
from eaas.chaos.history import Asked, Census, History, Incident
from eaas.chaos.load import OpenLoad, answers_of
from eaas.chaos.network import Namespace, why_no_namespace
from eaas.chaos.report import document_of, write_history
from eaas.chaos.schedule import CONTROL, SERVERS, Fault, lane
from eaas.chaos.watch import Watch
from eaas.config import load_config
from eaas.errors import ClusterError, EaasError
from eaas.local.interrupt import Interrupt
from eaas.local.nursery import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, Nursery
from eaas.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["Settings", "run_chaos"]

_START_S = 120.0
# After the last fault: longest that the cluster may take to be whole, and requests to end.
_WHOLE_S = 60.0
_LOOK_S = 0.1
# From the last request on: a heartbeat, and what is let go of after an answer.
_REST_S = 2.0
_PROMPTS, _PROMPT_TOKENS = 12, 12
# Until connections that nobody uses are closed.
_CLOSE_S = 15.0
# Before the run: servers that are lost.
_WARM_KILLS = 3
# Requests that let a heap settle: how much denser than in the run, and how many at once.
_DENSER, _AT_ONCE = 4.0, 8
# Before the run: a share of its time, as many as in the run, and limits of both. A heap grows with the first
# few hundred.
_WARM_SHARE, _WARM_S, _WARM_REQUESTS = 0.1, 120.0, 400
# After a short run whose memory has grown: limits of the requests that tell a leak from a heap that settles.
_SETTLE_S, _SETTLE_REQUESTS = 180.0, 1500
# Tokens of the cache that the first request leaves for its answer.
_SHORT = 64
# Of prompts: not of the run, so that a seed's answers are those of any other.
_PROMPT_SEED = 9


@dataclass(frozen=True)
class Settings:
    """What a run is made of.

    Attributes:
        seed: Draws faults and load.
        seconds: For so long faults come.
        kinds: Of `schedule.KINDS`.
        servers: Expert servers.
        redundancy: Servers that hold each expert; 2 at least.
        transport: shm, grpc or nixl.
        rate: Requests per second.
        max_tokens: Of each answer.
        model: Checkpoint, as the operator named it; empty: a demo checkpoint.
    """

    seed: int
    seconds: float
    kinds: tuple[str, ...]
    servers: int = 4
    redundancy: int = 2
    transport: str = "shm"
    rate: float = 4.0
    max_tokens: int = 24
    model: str = ""


def run_chaos(
    model: Path,
    settings: Settings,
    *,
    interrupt: Interrupt,
    say: Callable[[str], None],
    history_file: Path | None = None,
    nursery: Nursery | None = None,
) -> dict[str, Any]:
    """Attack a cluster of one's own, and check all that happened. Ends every process, whatever happens.

    Args:
        model: Checkpoint.
        settings: Of the run.
        interrupt: Ends it early.
        say: Progress, for people.
        history_file: Where every request and every fault is written, a line of JSON each.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        The document of `eaas chaos run --json`; `violations` is what went wrong.

    Raises:
        EaasError: Something did not start.
        Interrupted: The operator wants the end.
    """
    # What is wrong with a setting is to be said at once.
    load_config(attention_client={"transport": settings.transport})
    skipped = _cannot(settings.kinds, settings.transport)
    kinds = tuple(kind for kind in settings.kinds if kind not in skipped)
    for kind, why in skipped.items():
        say(f"no {kind}: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="eaas-chaos-") as scratch,
        _namespace("partition" in kinds) as namespace,
        nursing(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, nursery, interrupt) as forks,
    ):
        interrupt.check()
        answers = _known_answers(model, settings, forks, interrupt)
        cluster = ChaosCluster(
            model,
            servers=settings.servers,
            redundancy=settings.redundancy,
            transport=settings.transport,
            scratch=Path(scratch),
            namespace=namespace,
            nursery=forks,
        )
        if "damaged" in kinds:
            damaged_copy(model, cluster.damaged_model, random.Random(settings.seed))
        try:
            cluster.start(_START_S, interrupt)
            attack = _Attack(cluster, settings, namespace, interrupt, say)
            with attack.running():
                history = attack.run(answers, kinds)
        finally:
            cluster.stop()
    left = tuple(f"process {pid}" for pid in still_running(cluster.births))
    history = History(**(vars(history) | {"left_behind": left}))
    if history_file is not None:
        write_history(history, history_file)
    return document_of(settings, skipped, history, check(history))


def _cannot(kinds: Sequence[str], transport: str) -> dict[str, str]:
    """Kinds that there can be none of here, and why."""
    wanted = [kind for kind in ("partition", "memory") if kind in kinds]
    why = why_no_namespace() if wanted else ""
    found = dict.fromkeys(wanted, why) if why else {}
    if "unreachable" in kinds:
        if transport != "shm":
            found["unreachable"] = "needs --transport shm"
        elif os.geteuid() != 0:
            found["unreachable"] = "needs root"
    return found


@contextmanager
def _namespace(wanted: bool) -> Iterator[Namespace | None]:
    if not wanted:
        yield None
        return
    namespace = Namespace()
    try:
        yield namespace
    finally:
        namespace.remove()


def _prompts() -> list[list[int]]:
    dice = np.random.default_rng(_PROMPT_SEED)
    return [dice.integers(16, 250, _PROMPT_TOKENS).tolist() for _ in range(_PROMPTS)]


def _known_answers(
    model: Path, settings: Settings, nursery: Nursery, interrupt: Interrupt
) -> tuple[str, ...]:
    """What transformers' own experts answer, in one process."""
    single = ChildProcess(
        "single-process",
        (str(model.resolve()), "transformers", "1"),
        None,
        module="eaas.bench.baseline",
        nursery=nursery,
    )
    try:
        wait_ready([single], _START_S, interrupt)
        assert single.address is not None
        answers = answers_of(single.address, _prompts(), settings.max_tokens)
    finally:
        stop_all([single])
    for answer in answers:
        if answer.error:
            raise ClusterError(f"no known answers: {answer.error}")
    return tuple(answer.text for answer in answers)


class _Attack:
    """One run on a cluster that serves."""

    def __init__(
        self,
        cluster: ChaosCluster,
        settings: Settings,
        namespace: Namespace | None,
        interrupt: Interrupt,
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._faults = Faults(cluster, namespace)
        self._interrupt = interrupt
        self._say = say
        self._ends_at = math.inf
        self._incidents: list[Incident] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is begun here ends with it."""
        settings = self._settings
        with ExitStack() as stack:
            self._watch = Watch(self._cluster.endpoint, settings.redundancy, self._servers)
            stack.callback(self._watch.close)
            stack.callback(self._faults.calm)
            self._stack = stack
            yield

    def run(self, answers: tuple[str, ...], kinds: Sequence[str]) -> History:
        """Load, faults, rest."""
        settings, prompts = self._settings, _prompts()
        self._warm_up(prompts)
        before, between = self._settled(), None
        lanes = [
            lane(settings.seed, name, [k for k in kinds if k in whose], settings.servers)
            for name, whose in (("servers", SERVERS), ("control", CONTROL))
        ]
        asked = self._under_load(prompts, lanes)
        after = self._at_rest(before)
        if may_be_warm_up(before, after, len(asked)):
            self._say(
                "memory has grown: more requests, without faults, tell whether it settles ..."
            )
            between = after
            load = self._dense_load(prompts)
            requests = min(_DENSER * settings.rate * settings.seconds, _SETTLE_REQUESTS)
            self._wait_for(load, requests, 0.0, _SETTLE_S)
            asked += load.stop(_WHOLE_S)
            after = self._at_rest(before)
        incidents = tuple(self._incidents)
        return History(settings.redundancy, asked, answers, incidents, before, after, (), between)

    def _under_load(
        self, prompts: Sequence[Sequence[int]], lanes: Sequence[Iterator[Fault]]
    ) -> tuple[Asked, ...]:
        """Faults under load; returns the requests, when the last one has ended."""
        settings = self._settings
        load = OpenLoad(
            self._cluster.endpoint, prompts, settings.max_tokens, settings.rate, settings.seed
        )
        self._stack.callback(load.stop, 0.0)
        self._ends_at = time.monotonic() + settings.seconds
        self._drive([self._lane(faults) for faults in lanes])
        while (left := self._ends_at - time.monotonic()) > 0:
            self._interrupt.wait(left)
        return load.stop(_WHOLE_S)

    def _dense_load(self, prompts: Sequence[Sequence[int]]) -> OpenLoad:
        settings = self._settings
        rate = _DENSER * settings.rate
        load = OpenLoad(self._cluster.endpoint, prompts, settings.max_tokens, rate, 0, _AT_ONCE)
        self._stack.callback(load.stop, 0.0)
        return load

    def _wait_for(self, load: OpenLoad, requests: float, least_s: float, most_s: float) -> None:
        """Until a load has sent so many requests, within limits of time."""
        began = time.monotonic()
        while (for_s := time.monotonic() - began) < most_s:
            if for_s >= least_s and load.sent >= requests:
                return
            self._interrupt.wait(_LOOK_S)

    def _at_rest(self, before: dict[str, Census]) -> dict[str, Census]:
        """What there is once connections that nobody uses are closed."""
        self._interrupt.wait(_REST_S)
        after = self._census()
        patience = time.monotonic() + _CLOSE_S
        while _open(after) != _open(before) and time.monotonic() < patience:
            self._interrupt.wait(_REST_S / 4)
            after = self._census()
        return after

    def _warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Until what is made once, at first requests and first lost servers, is there."""
        settings = self._settings
        self._say("warming up ...")
        # One that needs the whole cache, whose pages are there once they were written.
        cache = self._cluster.config.attention_client
        longest = cache.cache_blocks * cache.cache_block_tokens - _SHORT
        filling = (list(prompts[0]) * longest)[:longest]
        (answer,) = answers_of(self._cluster.endpoint, [filling], 2)
        if answer.error:
            self._say(f"the cache is not filled beforehand, memory may grow: {answer.error}")
        load = self._dense_load(prompts)
        kills = [Fault("kill", 0.5, 0.1, (number,), 0) for number in range(_WARM_KILLS)]
        self._drive([self._lane(iter(kills))])
        requests = min(settings.rate * settings.seconds, _WARM_REQUESTS)
        least_s = min(_WARM_SHARE * settings.seconds, _WARM_S)
        self._wait_for(load, requests, least_s, _WARM_S)
        load.stop(_WHOLE_S)
        self._incidents.clear()
        self._interrupt.wait(_REST_S)

    def _servers(self) -> dict[str, int]:
        # In one step: another thread asks.
        children = tuple(self._cluster.children.values())
        return {c.name: c.pid for c in children if c.name.startswith("expert-server-")}

    def _census(self) -> dict[str, Census]:
        pids = {name: child.pid for name, child in self._cluster.children.items()}
        return census(pids, self._cluster.births)

    def _settled(self) -> dict[str, Census]:
        """What there is once nothing more is closed: the last connections of what came before linger."""
        now, patience = self._census(), time.monotonic() + _CLOSE_S
        while time.monotonic() < patience:
            last = now
            self._interrupt.wait(_REST_S)
            now = self._census()
            if _open(now) == _open(last):
                break
        return now

    # -- lanes ----------------------------------------------------------------------------------------

    def _drive(self, lanes: Iterator[Steps] | Sequence[Steps]) -> None:
        """Carry out what each lane wants, when it wants it, until all have ended."""
        agenda = [(time.monotonic(), number, steps) for number, steps in enumerate(lanes)]
        while agenda:
            at, number, steps = heapq.heappop(agenda)
            self._interrupt.wait(max(0.0, at - time.monotonic()))
            pause = next(steps, None)
            if pause is not None:
                heapq.heappush(agenda, (time.monotonic() + pause, number, steps))

    def _lane(self, faults: Iterator[Fault]) -> Steps:
        """One fault after another; each is mended, and the cluster whole again, before the next."""
        for fault in faults:
            yield fault.calm_s
            if time.monotonic() >= self._ends_at:
                return
            yield from self._meet(fault)

    def _meet(self, fault: Fault) -> Steps:
        began, failure = time.monotonic(), ""
        try:
            yield from self._faults.strike(fault)
        except EaasError as error:
            failure = str(error)
        mended = time.monotonic()
        while not self._watch.whole_since(mended):
            if time.monotonic() > mended + _WHOLE_S:
                failure = failure or self._watch.missing
                break
            yield _LOOK_S
        target = ", ".join(self._faults.targets(fault)) or "the cluster"
        whole = math.inf if failure else time.monotonic()
        incident = Incident(fault.kind, target, began, mended, whole, failure)
        self._incidents.append(incident)
        # What comes before the run is of no interest, unless it goes wrong.
        if math.isinf(self._ends_at) and not failure:
            return
        self._say(
            f"{fault.kind} of {target}: {mended - began:.1f} s, whole again {whole - mended:.1f} s later"
            + (f"; {failure}" if failure else "")
        )


def _open(census: dict[str, Census]) -> dict[str, int]:
    return {name: one.descriptors for name, one in census.items()}

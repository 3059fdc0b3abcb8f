"""`eaas chaos run`, in the launcher: start a cluster, load it, inject faults, and check the history."""

from __future__ import annotations

import heapq
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.generation.sizes import EngineSizes
from eaas.config import load_config
from eaas.errors import ClusterError, EaasError
from eaas_cli.bench.load import Asked, Load, poisson
from eaas_cli.bench.serve import single_process, with_fork_server
from eaas_cli.chaos.check import check, settled
from eaas_cli.chaos.cluster import CACHE_BLOCKS, CLIENT_COUNT, ChaosCluster
from eaas_cli.chaos.faults import Faults, Steps, damaged_copy
from eaas_cli.chaos.history import (
    Census,
    History,
    Incident,
    Settings,
    census,
    still_running,
)
from eaas_cli.chaos.network import Namespace, why_no_namespace
from eaas_cli.chaos.report import document_of, write_history
from eaas_cli.chaos.schedule import CLIENTS, CONTROL, SERVERS, Fault, lane
from eaas_cli.chaos.watch import Watch
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, ForkServer
from eaas_cli.local.interface import CLIENT, SERVER
from eaas_cli.local.interrupt import Interrupt

__all__ = ["run_chaos"]

_START_S = 120.0
# Deadline after a fault for the cluster to be whole and for requests to end.
_WHOLE_S = 60.0
_POLL_S = 0.1
# Pause after the last request, for a heartbeat and for the release of the request's resources.
_REST_S = 2.0
# Longer than the deadline of any layer call: a request that is silent for this long is lost.
_READ_S = 30.0
_PROMPTS, _PROMPT_TOKENS = 12, 12
# Deadline for unused connections to close.
_CLOSE_S = 15.0
# Servers killed during the warm-up.
_WARM_KILLS = 3
# Load that lets a heap settle: its rate as a multiple of the run's, and the limit of concurrent requests.
_DENSER, _AT_ONCE = 4.0, 8
# Warm-up: share of the run's time, limit in seconds, limit of requests. A heap grows during the first few
# hundred requests.
_WARM_SHARE, _WARM_S, _WARM_REQUESTS = 0.1, 120.0, 400
# Limits of the further requests that tell a leak from a settling heap.
_SETTLE_S, _SETTLE_REQUESTS = 180.0, 1500
# Tokens of the key-value cache that the filling request leaves free.
_SHORT = 64
# The seed is fixed, so that all runs ask the same prompts.
_PROMPT_SEED = 9


def run_chaos(
    model: Path,
    settings: Settings,
    *,
    interrupt: Interrupt,
    say: Callable[[str], None],
    history_file: Path | None = None,
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Run a cluster under load and faults, and check its history. Ends every process, even on an error.

    Args:
        history_file: File for a JSON line per request and per fault.
        fork_server: Forks the processes; it keeps running afterwards. None: the run starts its own.

    Returns:
        The document of `eaas chaos run --json`.

    Raises:
        EaasError: A process did not start.
        Interrupted: A signal came.
    """
    # Load the settings first, so that a wrong one fails before anything starts.
    load_config(attention_client={"transport": settings.transport})
    skipped = _cannot(settings.kinds, settings.transport)
    kinds = tuple(kind for kind in settings.kinds if kind not in skipped)
    for kind, why in skipped.items():
        say(f"no {kind}: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="eaas-chaos-") as scratch,
        _namespace("partition" in kinds) as namespace,
        with_fork_server(
            CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, fork_server, interrupt
        ) as forks,
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
            fork_server=forks,
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
    """Faults that this machine cannot inject, each with the reason; the run skips them."""
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
    model: Path, settings: Settings, fork_server: ForkServer, interrupt: Interrupt
) -> tuple[str, ...]:
    """Compute the correct answers with transformers' own experts, in one process, before the run."""
    with single_process(model, "transformers", 1, fork_server, interrupt) as single:
        load = Load(str(single.address), _prompts(), settings.max_tokens, most_at_once=1)
        answers = load.result().answers
    for answer in answers:
        if answer.error:
            raise ClusterError(f"no known answers: {answer.error}")
    return tuple(answer.text for answer in answers)


class _Attack:
    """Warm-up, faults and load of one chaos run, on a cluster that already serves."""

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
        """Context in which the cluster is watched; its exit ends loads and resumes stopped processes."""
        settings = self._settings
        with ExitStack() as stack:
            self._watch = Watch(self._cluster.endpoint, settings.redundancy, self._serving)
            stack.callback(self._watch.close)
            stack.callback(self._faults.calm)
            self._stack = stack
            yield

    def run(self, answers: tuple[str, ...], kinds: Sequence[str]) -> History:
        """Warm up, inject faults under load, and let the cluster settle; return the history."""
        settings, prompts = self._settings, _prompts()
        self._warm_up(prompts)
        before = self._steady()
        lanes = [
            lane(settings.seed, name, [k for k in kinds if k in whose], processes)
            for name, whose, processes in (
                ("servers", SERVERS, settings.servers),
                ("clients", CLIENTS, CLIENT_COUNT),
                ("control", CONTROL, 0),
            )
        ]
        asked = self._under_load(prompts, lanes)
        self._fill_caches(prompts)
        after, incidents = self._at_rest(before), tuple(self._incidents)
        history = History(settings.redundancy, asked, answers, incidents, before, after, ())

        def more() -> tuple[tuple[Asked, ...], dict[str, Census]]:
            self._say(
                "memory has grown: sending more requests without faults to see whether it settles ..."
            )
            load = self._dense_load(prompts)
            requests = min(_DENSER * settings.rate * settings.seconds, _SETTLE_REQUESTS)
            self._wait_for(load, requests, 0.0, _SETTLE_S)
            return load.stop(_WHOLE_S).asked, self._at_rest(before)

        return settled(history, more)

    def _under_load(
        self, prompts: Sequence[Sequence[int]], lanes: Sequence[Iterator[Fault]]
    ) -> tuple[Asked, ...]:
        """Inject faults under load; return the requests once all have ended."""
        settings = self._settings
        load = self._load(prompts, settings.rate, settings.seed)
        self._ends_at = time.monotonic() + settings.seconds
        self._drive([self._lane(faults) for faults in lanes])
        while (left := self._ends_at - time.monotonic()) > 0:
            self._interrupt.wait(left)
        return load.stop(_WHOLE_S).asked

    def _dense_load(self, prompts: Sequence[Sequence[int]]) -> Load:
        return self._load(prompts, _DENSER * self._settings.rate, 0, _AT_ONCE)

    def _load(
        self, prompts: Sequence[Sequence[int]], rate: float, seed: int, most: int | None = None
    ) -> Load:
        order, endpoint = poisson(rate, len(prompts), seed), self._cluster.endpoint
        tokens = self._settings.max_tokens
        load = Load(endpoint, prompts, tokens, order, most_at_once=most, read_s=_READ_S)
        self._stack.callback(load.stop)
        return load

    def _wait_for(self, load: Load, requests: float, least_s: float, most_s: float) -> None:
        """Wait until a load has sent `requests`, for `least_s` to `most_s` seconds."""
        began = time.monotonic()
        while (for_s := time.monotonic() - began) < most_s:
            if for_s >= least_s and load.sent >= requests:
                return
            self._interrupt.wait(_POLL_S)

    def _at_rest(self, before: dict[str, Census]) -> dict[str, Census]:
        """Count the processes' resources after the load, once as many files are open as before it."""
        self._interrupt.wait(_REST_S)
        after = self._census()
        patience = time.monotonic() + _CLOSE_S
        while _open(after) != _open(before) and time.monotonic() < patience:
            self._interrupt.wait(_REST_S / 4)
            after = self._census()
        return after

    def _warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Warm up caches and heaps before the first census: send requests, kill servers; record nothing."""
        settings = self._settings
        self._say("warming up ...")
        load = self._dense_load(prompts)
        kills = [Fault("kill", 0.5, 0.1, (number,), 0) for number in range(_WARM_KILLS)]
        self._drive([self._lane(iter(kills))])
        requests = min(settings.rate * settings.seconds, _WARM_REQUESTS)
        least_s = min(_WARM_SHARE * settings.seconds, _WARM_S)
        self._wait_for(load, requests, least_s, _WARM_S)
        load.stop(_WHOLE_S)
        # After the kills, since a prompt of this length lets the heaps of servers grow, too.
        self._fill_caches(prompts)
        self._incidents.clear()
        self._interrupt.wait(_REST_S)

    def _fill_caches(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill the key-value cache of each client, so that all its pages are allocated."""
        longest = CACHE_BLOCKS * EngineSizes.page_size - _SHORT
        # At the same time, and with nothing in common, so that no client gets two of them.
        fillings = [(list(prompts[i]) * longest)[:longest] for i in range(CLIENT_COUNT)]
        for answer in Load(self._cluster.endpoint, fillings, 2).result().answers:
            if answer.error:
                self._say(f"a cache could not be filled, so memory may grow: {answer.error}")

    def _serving(self) -> dict[str, int]:
        # Copy in one step, because another thread calls this.
        children = tuple(self._cluster.children.values())
        return {c.name: c.pid for c in children if c.name.startswith((SERVER, CLIENT))}

    def _census(self) -> dict[str, Census]:
        pids = {name: child.pid for name, child in self._cluster.children.items()}
        return census(pids, self._cluster.births)

    def _steady(self) -> dict[str, Census]:
        """Count the processes' resources before the faults, once their number of open files is steady."""
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
        """Run the fault steps of all lanes in this thread, each when it is due, until all lanes end."""
        agenda = [(time.monotonic(), number, steps) for number, steps in enumerate(lanes)]
        while agenda:
            at, number, steps = heapq.heappop(agenda)
            self._interrupt.wait(max(0.0, at - time.monotonic()))
            pause = next(steps, None)
            if pause is not None:
                heapq.heappush(agenda, (time.monotonic() + pause, number, steps))

    def _lane(self, faults: Iterator[Fault]) -> Steps:
        """Yield through the faults of one lane; each starts once the cluster is whole again."""
        for fault in faults:
            yield fault.calm_s
            if time.monotonic() >= self._ends_at:
                return
            yield from self._inject(fault)

    def _inject(self, fault: Fault) -> Steps:
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
            yield _POLL_S
        target = ", ".join(self._faults.targets(fault)) or "the cluster"
        whole = math.inf if failure else time.monotonic()
        incident = Incident(fault.kind, target, began, mended, whole, failure)
        self._incidents.append(incident)
        # The warm-up reports failures only.
        if math.isinf(self._ends_at) and not failure:
            return
        self._say(
            f"{fault.kind} of {target}: {mended - began:.1f} s, whole again {whole - mended:.1f} s later"
            + (f"; {failure}" if failure else "")
        )


def _open(census: dict[str, Census]) -> dict[str, int]:
    return {name: one.descriptors for name, one in census.items()}

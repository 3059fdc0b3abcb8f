"""vLLM's answers while expert servers are killed or stopped. The tests share an endpoint.

KILL_MOMENTS is the number of kills, KILL_SEED the seed.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eaas.checkpoint import quiet_transformers
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import wait_ready
from simulator.traces.record import read_prompts
from vllm_endpoint import Answer, VllmEndpoint
from vllm_python import NEEDS_VLLM, ROOT
from waiting import eventually

MOMENTS = int(os.environ.get("KILL_MOMENTS", "20"))
SEED = int(os.environ.get("KILL_SEED", "7"))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.chaos,
    pytest.mark.nightly,
    pytest.mark.timeout(600 + 60 * MOMENTS),
    NEEDS_VLLM,
]

SERVERS, REDUNDANCY = 3, 2
DOMAINS = ("code", "prose", "german", "manual")
TOKENS = 120
# What a busy machine adds to one gap must not fail the test.
USUAL_STALL_S, WORST_STALL_S = 0.5, 2.0
LONGEST_STOP_S = 3.0
GONE_S = 5.0


class World:
    """A cluster, vLLM's endpoint and the right answers.

    Attributes:
        usual_s: Time of the concurrent streams without faults.
    """

    def __init__(self, cluster: LocalCluster, endpoint: VllmEndpoint, prompts: list[str]) -> None:
        self.cluster, self.endpoint, self.prompts = cluster, endpoint, prompts
        self.right = [endpoint.streams([p], TOKENS).answers()[0].text for p in prompts]
        started = time.monotonic()
        self.answers_during(lambda: None)
        self.usual_s = time.monotonic() - started

    def answers_during(self, fault: Callable[[], object]) -> list[Answer]:
        """Concurrent answers, all of them right; `fault` is called once all have begun."""
        streams = self.endpoint.streams(self.prompts, TOKENS)
        try:
            streams.wait_begun()
            fault()
        finally:
            answers = streams.answers()
        assert [answer.tokens for answer in answers] == [TOKENS] * len(answers)
        assert [answer.text for answer in answers] == self.right
        return answers

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.cluster.children[name].pid, number)

    def wait_covered(self) -> None:
        eventually(lambda: self.endpoint.min_replicas() == REDUNDANCY, what="the coverage")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in float32, for which texts must be equal."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, demo = tmp_path_factory.mktemp("models") / "demo", ROOT / "examples" / "demo"
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(demo).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def world(
    exact: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    directory = ROOT / "examples" / "traces" / "prompts"
    prompts = [text for d in DOMAINS for text in read_prompts(directory / f"{d}.txt")[:2]]
    logs = tmp_path_factory.mktemp("logs")
    with LocalCluster(
        exact,
        servers=SERVERS,
        redundancy=REDUNDANCY,
        clients=0,
        fork_server=fork_server,
        log_dir=logs,
    ) as cluster:
        # vLLM runs float32 checkpoints in bfloat16 unless it is told otherwise.
        options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
        endpoint = VllmEndpoint(exact, cluster.monitor_address, logs / "vllm.log", *options)
        try:
            endpoint.wait_serving()
            yield World(cluster, endpoint, prompts)
        finally:
            endpoint.end()


def check_stalls(name: str, stalls_s: list[float]) -> None:
    ordered = sorted(round(1000 * stall_s) for stall_s in stalls_s)
    print(f"{name}: worst gap of each of {len(ordered)} moments in ms: {ordered}", flush=True)
    assert statistics.median(stalls_s) < USUAL_STALL_S
    assert max(stalls_s) < WORST_STALL_S


def test_other_batches_change_no_text(world: World) -> None:
    stalls_s = []
    for _ in range(5):
        answers = world.answers_during(lambda: None)
        stalls_s.append(max(answer.worst_gap_s for answer in answers))
    check_stalls("without faults", stalls_s)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=lambda blow: blow.name)
def test_any_server_at_any_moment(world: World, blow: signal.Signals) -> None:
    dice = random.Random(f"{SEED} {blow.name}")
    stalls_s = []
    for _ in range(MOMENTS):
        victim = f"expert-server-{dice.randrange(SERVERS)}"
        before_s, between_s = dice.uniform(0, 0.8 * world.usual_s), dice.uniform(0, LONGEST_STOP_S)

        def strike(
            victim: str = victim, waits: tuple[float, float] = (before_s, between_s)
        ) -> None:
            time.sleep(waits[0])
            world.signal(victim, blow)
            time.sleep(waits[1])
            if blow == signal.SIGKILL:
                world.cluster.restart(victim)
            else:
                world.signal(victim, signal.SIGCONT)

        answers = world.answers_during(strike)
        stalls_s.append(max(answer.worst_gap_s for answer in answers))
        world.wait_covered()
    check_stalls(blow.name, stalls_s)


def test_all_servers_gone(world: World) -> None:
    """The batch waits, and goes on with the restarted servers."""
    names = [f"expert-server-{i}" for i in range(SERVERS)]

    def strike() -> None:
        for name in names:
            world.signal(name, signal.SIGKILL)
        time.sleep(GONE_S)
        wait_ready([world.cluster.start_again(name) for name in names], 60)

    answers = world.answers_during(strike)
    stalls_s = sorted(round(answer.worst_gap_s, 1) for answer in answers)
    print(f"all servers gone for {GONE_S:g} s, worst gap of each stream in s: {stalls_s}")
    assert min(answer.worst_gap_s for answer in answers) > GONE_S - 1
    world.wait_covered()
    world.answers_during(lambda: None)

"""Rows 53, 54, 56 and 57 of the fault contract: frontends and two attention clients in a cluster whose
processes die or are cut off. Each test quotes its row.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from chaos_world import CutOffCluster, MemberLog
from completions import Load
from eaas.config import load_config
from eaas.types import MemberState
from eaas_cli.chaos.cluster import free_port
from eaas_cli.local.arguments import frontend_words
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import wait_ready
from eaas_cli.local.restart import keep_port
from waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

FRONTEND, SECOND = "frontend", "frontend-1"
CLIENTS = ("attention-client-0", "attention-client-1")
RUNNING = "vllm:num_requests_running"
SERVING, DEAD = MemberState.SERVING, MemberState.DEAD


class TwoClients(CutOffCluster):
    """A cluster with two attention clients, and with a second frontend where a test wants it."""

    def start_second_frontend(self) -> str:
        """Start another frontend, and return its endpoint."""
        words = frontend_words(
            self.config, SECOND, self.monitor_address, self.model, operator_page=False
        )
        second = self._spawn(SECOND, *words)
        wait_ready([second], 60.0)
        assert second.address is not None
        second.arguments = keep_port(second.arguments, second.address)
        return second.address


@pytest.fixture
def start(
    checkpoint: Callable[..., Path], fork_server: ForkServer, tmp_path: Path
) -> Iterator[Callable[..., TwoClients]]:
    """Start a cluster; the arguments are processes with a proxy."""
    started = []

    def start(*cut_off: str) -> TwoClients:
        config = load_config(
            frontend={"port": 0},
            attention_client={"compile": False, "cache_blocks": 64},
            monitor={"port": free_port("127.0.0.1"), "data_dir": str(tmp_path / "monitor")},
        )
        cluster = TwoClients(
            checkpoint(),
            clients=2,
            cut_off=cut_off,
            config=config,
            log_dir=tmp_path / "logs",
            fork_server=fork_server,
        )
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()


def test_row_53_a_frontend_cut_off_from_the_monitor(start: Callable[..., TwoClients]) -> None:
    """Row 53: a frontend cut off from the monitor: it serves on with the engines that it knows, and moves
    requests among them; afterwards it finds new ones.
    """
    cluster = start(FRONTEND)
    log = MemberLog(cluster.monitor_address)
    load = Load(cluster.endpoint, streams=4, tokens=24)
    with load.running():
        cluster.proxies[FRONTEND].cut(up=True, down=True)
        eventually(lambda: log.states(FRONTEND)[-1:] == [DEAD])
        load.some_more()
        cluster.children[CLIENTS[0]].signal(signal.SIGKILL)
        load.some_more()
        cluster.proxies[FRONTEND].heal()
        cluster.restart(CLIENTS[0])
        eventually(lambda: log.states(FRONTEND)[-1:] == [SERVING])
        cluster.children[CLIENTS[1]].signal(signal.SIGKILL)
        load.some_more()
    log.close()


def test_row_54_an_engine_cut_off_from_the_monitor(start: Callable[..., TwoClients]) -> None:
    """Row 54, the reverse: an engine cut off from the monitor but not from the frontend: its requests move;
    afterwards it is used again.
    """
    cluster = start(CLIENTS[0])
    log = MemberLog(cluster.monitor_address)
    load = Load(cluster.endpoint, streams=4, tokens=24)
    with load.running():
        cluster.proxies[CLIENTS[0]].cut(up=True, down=True)
        eventually(lambda: log.states(CLIENTS[0])[-1:] == [DEAD])
        load.some_more()
        cluster.proxies[CLIENTS[0]].heal()
        eventually(lambda: log.states(CLIENTS[0])[-1:] == [SERVING])
        cluster.children[CLIENTS[1]].signal(signal.SIGKILL)
        load.some_more()
    log.close()


STREAMS, CHOICES = 8, 2
TOWNS = ["Łódź 🙂", "Århus 🌊", "Oslo"]


def guided(client: httpx.Client, number: int, towns: int) -> list[str]:
    """The choices of a streamed guided answer: a list of so many towns."""
    schema = {"type": "array", "items": {"enum": TOWNS}, "minItems": towns, "maxItems": towns}
    body = {
        "messages": [{"role": "user", "content": f"Towns, list {number}:"}],
        "n": CHOICES,
        "temperature": 1,
        "seed": number,
        "max_tokens": 30 * towns,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "stream": True,
    }
    texts = [""] * CHOICES
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


class GuidedStreams:
    """Streams that are asked for again and again; each must say what it said first.

    Attributes:
        answers: Number of answers.
        wrong: Answers that differ, and errors.
    """

    def __init__(self, endpoint: str, towns: int) -> None:
        self._client, self._towns = httpx.Client(base_url=endpoint, timeout=120), towns
        self._right = [guided(self._client, number, towns) for number in range(STREAMS)]
        for texts in self._right:
            assert all(len(json.loads(text)) == towns for text in texts)
        self.answers, self.wrong = 0, []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                texts = guided(self._client, number, self._towns)
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
                return
            self.answers += 1
            if texts != self._right[number]:
                self.wrong.append(f"{texts}, not {self._right[number]}")

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


@pytest.mark.parametrize(
    ("down_s", "towns"), [(0.5, 6), pytest.param(5.0, 20, marks=pytest.mark.nightly)]
)
def test_row_56_every_process_but_the_frontend_killed_once(
    start: Callable[..., TwoClients], down_s: float, towns: int
) -> None:
    """Row 56: 8 streams of two choices with guided JSON while every process but the frontend is killed once,
    in random order, each restarted after 5 s (0.5 s, and shorter texts, in `make test`): no error, every text
    as without a kill.
    """
    cluster = start()
    streams = GuidedStreams(cluster.endpoint, towns)
    names = sorted(cluster.children.keys() - {FRONTEND})
    random.Random(1).shuffle(names)
    try:
        for name in names:
            before = streams.answers
            cluster.children[name].signal(signal.SIGKILL)
            time.sleep(down_s)
            cluster.restart(name)
            eventually(lambda: streams.wrong or streams.answers > before, what="answers")  # noqa: B023
    finally:
        streams.stop()
    assert not streams.wrong


def test_row_57_one_of_two_frontends_is_killed(start: Callable[..., TwoClients]) -> None:
    """Row 57: one of two frontends is killed: its own connections end, no other stream notices, and the
    engines forget its requests; once restarted it answers as before.
    """
    cluster = start()
    endpoint = cluster.start_second_frontend()
    load = Load(cluster.endpoint, streams=4, tokens=24)
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with load.running():
        url = f"{endpoint}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            cluster.children[SECOND].signal(signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        load.some_more()
        cluster.restart(SECOND)
        load.some_more()
    eventually(lambda: running(cluster.endpoint) == 0)
    with Load(endpoint, streams=2, tokens=24).running():
        pass


def running(endpoint: str) -> int:
    """Requests in the engines' batches, of all frontends."""
    page = httpx.get(f"{endpoint}/metrics", timeout=10).text
    lines = (each.split() for each in page.splitlines())
    return next(int(float(line[-1])) for line in lines if line[:1] and line[0].startswith(RUNNING))

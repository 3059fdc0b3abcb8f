"""A route's memory for its calls: made once, of a fixed size, and whole again after them."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from arena_server import ArenaServer, context_of
from attention_client.exchange import Exchange, Route, _exchange
from attention_client.telemetry.metrics import ClientMetrics
from waiting import eventually

HIDDEN, EXPERTS, SLOTS = 8, 4, 200
HELPERS = Path(__file__).parents[3] / "helpers"


class Servers:
    """Servers that hold every expert, and a route to them; the test answers."""

    def __init__(self, servers: int = 2, capacity: int = 1024) -> None:
        metrics = ClientMetrics(CollectorRegistry())
        self.made = [ArenaServer(f"s{i}", metrics, HIDDEN, SLOTS, capacity) for i in range(servers)]
        _, (view,) = context_of(self.made, 1, EXPERTS, metrics, 20.0, 5.0)
        self.slots = [server.connection.slots for server in self.made]
        replicas = view.replicas(view.usable_S())
        held = replicas.first_LX, replicas.server_N, replicas.share_N
        self.route = Route(view, self.slots, *held, 1, EXPERTS, False, 5.0)
        for slots in self.slots:
            slots.set_times(np.full(32, 5.0), 0.0)

    def start(
        self, tokens: int = 2, top_k: int = 2, dtype: torch.dtype = torch.bfloat16, wanted: int = 0
    ) -> Exchange | None:
        """Start a call; of its first tokens alone, if so many are wanted."""
        x_TH = torch.ones(tokens, HIDDEN, dtype=dtype)
        ids_TK = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % EXPERTS
        wanted_T = torch.arange(tokens) < wanted if wanted else None
        ones_TK = torch.ones(tokens, top_k)
        return self.route.start(0, x_TH, ids_TK, ones_TK, wanted_T, 3, 20.0, time.monotonic())

    def start_all(self) -> list[Exchange]:
        """Start calls until the route starts no more."""
        return list(iter(self.start, None))

    def answer(self, exchange: Exchange) -> None:
        for server, slot in exchange.sent:
            self.made[server].answer(slot)

    def finish(self, exchange: Exchange) -> None:
        self.answer(exchange)
        assert torch.equal(exchange.finish(), torch.tensor([[3.0], [5.0]]).expand(2, HIDDEN))

    def take_over(self, exchange: Exchange) -> None:
        self.answer(exchange)
        for server, slot, *_ in exchange.requests():
            assert self.slots[server].free(slot)
            self.slots[server].give(slot)
            self.slots[server].leave()
        assert exchange.requests() == [] == exchange.sent


ENDS: list[Callable[[Servers, Exchange], None]] = [
    Servers.finish,
    Servers.take_over,
    # The last reference goes, with requests in flight.
    lambda _servers, _exchange: None,
]


@pytest.mark.parametrize("end", ENDS, ids=["finish", "take over", "drop"])
def test_a_call_begins_where_another_has_ended(end: Callable[[Servers, Exchange], None]) -> None:
    servers = Servers()
    calls = servers.start_all()
    assert 2 < len(calls) == servers.route.running < SLOTS
    for _ in range(2 * len(calls)):
        assert servers.start() is None
        end(servers, calls.pop(0))
        assert servers.route.running == len(calls)
        started = servers.start()
        assert started is not None
        assert started.advance(time.monotonic()) is None
        calls.append(started)
    for call in calls:
        servers.finish(call)
        with pytest.raises(ValueError, match="over"):
            call.finish()
    assert servers.route.running == 0


@given(
    steps=st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from(ENDS), st.integers(0, 15))), max_size=60
    )
)
def test_no_memory_is_lost_whatever_the_order_of_calls(
    steps: list[tuple[Callable[[Servers, Exchange], None], int] | None],
) -> None:
    servers = Servers()
    most = len(servers.start_all())
    calls: list[Exchange] = []
    for step in steps:
        if step is None:
            before = len(calls)
            calls += [call for call in [servers.start()] if call is not None]
            assert len(calls) == min(before + 1, most)
        elif step[1] < len(calls):
            end, at = step
            end(servers, calls.pop(at))
        assert servers.route.running == len(calls)
    calls.clear()
    assert servers.route.running == 0
    assert [slots.users for slots in servers.slots] == [0, 0]
    assert len(servers.start_all()) == most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_that_all_slots_together_cannot_hold_is_refused(dtype: torch.dtype) -> None:
    servers = Servers(capacity=1024)
    assert servers.start(top_k=EXPERTS, dtype=dtype) is not None
    # 1024 bytes hold the float32 sums of 32 tokens, and 21 to 25 requests with four experts each.
    assert servers.start(100, 1, dtype, wanted=1) is None
    assert servers.start(60, 4, dtype) is None
    assert servers.start(40, 1, dtype) is not None
    assert servers.start(30, 1, dtype, wanted=3) is not None
    # More experts than there was room for.
    assert servers.start(40, 40, dtype, wanted=1) is None
    assert servers.start(1, 200, dtype) is None
    assert servers.route.running == 0


def test_later_calls_may_have_more_experts_if_there_is_room() -> None:
    """The first call has room for 64 tokens with an expert each on two servers."""
    servers = Servers()
    assert servers.start(2, 1) is not None
    assert servers.start(10, 3) is not None
    # On both servers, that is twice the room.
    assert servers.start(21, 3) is None


def test_a_first_call_that_fits_nowhere_changes_nothing() -> None:
    servers = Servers()
    assert servers.start(1, 1000) is None
    assert servers.route.running == 0
    servers.finish(servers.start_all()[0])


def test_only_one_method_of_a_call_runs_at_a_time() -> None:
    """The memory of a call that a thread waits for is not given away."""
    servers = Servers()
    call = servers.start()
    assert call is not None
    out: list[torch.Tensor | None] = []
    thread = threading.Thread(target=lambda: out.append(call.finish()))
    thread.start()

    def is_refused() -> bool:
        try:
            call.advance(0.0)
        except ValueError:
            return True
        return False

    eventually(is_refused, 10.0)
    with pytest.raises(ValueError, match="another thread"):
        call.requests()
    servers.answer(call)
    thread.join(10)
    assert out[0] is not None
    assert servers.route.running == 0


def test_a_call_takes_no_memory(tmp_path: Path) -> None:
    """In another process, whose allocator counts. Python's small objects and torch's result are theirs."""
    counter = tmp_path / "counter.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    build = [*compiler, "-O1", "-shared", "-fPIC", "-o", str(counter)]
    subprocess.run([*build, str(HELPERS / "malloc_counter.c")], check=True, timeout=60)
    ran = subprocess.run(
        [sys.executable, __file__, str(counter)],
        env=os.environ | {"LD_PRELOAD": str(counter), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    # Small objects of Python's own allocator.
    assert Exchange.__basicsize__ <= 64


def _count_blocks(counter: ctypes.CDLL) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    (code,) = (m for m in maps if str(_exchange.__file__) in m and " r-xp " in m)
    counter.set_module(*(ctypes.c_size_t(int(at, 16)) for at in code.split()[0].split("-")))
    servers = Servers()
    x_TH, ids_TK, ones_TK = (
        torch.ones(3, HIDDEN),
        torch.ones(3, 2, dtype=torch.int64),
        torch.ones(3, 2),
    )
    start, watch, now = servers.route.start, counter.watch, time.monotonic
    gc.disable()
    for call in range(3000):
        before_all, before = watch(0, 0), watch(1, 1)
        exchange = start(0, x_TH, ids_TK, ones_TK, None, 3, 20.0, now())
        began_all, began = watch(0, 0), watch(0, 1)
        assert exchange is not None
        servers.answer(exchange)
        watch(1, 1)
        exchange.finish()
        ended = watch(0, 1)
        servers.route.take()
        if call == 0:
            assert began > before, "the counter counts"
        elif call > 100:
            assert (began, ended) == (before, before), "blocks of the module"
            assert began_all == before_all, "blocks of anyone in `start`"


if __name__ == "__main__":
    _count_blocks(ctypes.CDLL(sys.argv[1]))

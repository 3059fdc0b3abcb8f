"""Faults from a seed."""

from __future__ import annotations

import itertools
import os
import sys

from hypothesis import given
from hypothesis import strategies as st

from eaas_cli.chaos.schedule import CLIENTS, KINDS, SERVERS, Fault, lane
from helper_process import output_of


def first(count: int, seed: int, kinds: tuple[str, ...], servers: int = 4) -> list[Fault]:
    return list(itertools.islice(lane(seed, "servers", kinds, servers), count))


@given(st.integers(), st.sets(st.sampled_from(KINDS), min_size=1), st.integers(2, 9))
def test_every_kind_comes_once_before_any_comes_again(
    seed: int, kinds: set[str], servers: int
) -> None:
    faults = first(3 * len(kinds), seed, tuple(kinds), servers)
    for turn in range(3):
        part = faults[turn * len(kinds) : (turn + 1) * len(kinds)]
        assert {fault.kind for fault in part} == kinds


@given(st.integers(), st.integers(2, 9))
def test_a_fault_hits_existing_servers(seed: int, servers: int) -> None:
    for fault in first(2 * len(KINDS), seed, KINDS, servers):
        met = {"pair": 2}.get(fault.kind, int(fault.kind in SERVERS + CLIENTS))
        assert len(set(fault.numbers)) == len(fault.numbers) == met
        assert all(0 <= number < servers for number in fault.numbers)
        assert fault.calm_s > 0
        assert fault.lasts_s >= 0


def test_the_seed_and_the_lane_decide_and_not_the_order_of_kinds() -> None:
    assert first(20, 5, SERVERS) == first(20, 5, tuple(reversed(SERVERS)))
    assert first(20, 5, SERVERS) != first(20, 6, SERVERS)
    one, other = ([f.calm_s for f in itertools.islice(lane(1, n, KINDS, 4), 9)] for n in "ab")
    assert one != other


def test_a_seed_draws_the_same_in_every_process() -> None:
    script = (
        "import itertools; from eaas_cli.chaos.schedule import *;"
        f"print([f.kind for f in itertools.islice(lane(3, 'servers', {KINDS!r}, 4), 30)])"
    )
    # This process has another hash seed.
    told = output_of(sys.executable, "-c", script, env=os.environ | {"PYTHONHASHSEED": "1"})
    assert told.strip() == str([fault.kind for fault in first(30, 3, KINDS)])

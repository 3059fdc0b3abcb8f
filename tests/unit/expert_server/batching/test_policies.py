"""The policies with no clock but the test's; simulated clients give ADR 0008's figures (`-s` prints them)."""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_server.loop.batching import Batcher, Compute, Wait, create_batcher
from expert_server.loop.batching.policies import BatchCost, Companion

LAYERS, WINDOW_S = 3, 0.5
MODES = ("immediate", "window", "all")


def batcher(mode: str, window_s: float = WINDOW_S, layers: int = LAYERS) -> Batcher[str, object]:
    return create_batcher(mode, window_s, layers)  # type: ignore[arg-type]


def answer(batcher: Batcher, now: float, took_s: float = 0.0) -> tuple[int, list]:
    """Compute the next batch; all requests here are (connection, ...) tuples."""
    decision = batcher.decide(now)
    assert isinstance(decision, Compute)
    requests = batcher.take(decision.layer)
    if took_s:
        batcher.computed(len(requests), took_s)
    for connection, *_ in requests:
        batcher.answered(connection, now + took_s)
    return decision.layer, requests


# -- in every mode --------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "compute", "gone"]),
        st.sampled_from("abcd"),
        st.integers(0, LAYERS - 1),
        st.floats(0, 2 * WINDOW_S),
    ),
    max_size=60,
)


@given(st.sampled_from(MODES), STEPS)
def test_each_request_is_computed_once_the_oldest_layer_first_and_waits_are_bounded(
    mode: str, steps
) -> None:
    b = batcher(mode)
    now = 0.0
    # A request joins its layer's batch until that is taken.
    waiting: list[tuple[str, int, int]] = []  # (connection, layer, number), oldest first
    could_begin: float | None = None  # when the oldest layer could have been computed
    present: list[str] = []
    connections: set[str] = set()

    def look() -> None:
        """What the loop does: decide, and compute if that is the decision."""
        nonlocal could_begin
        decision = b.decide(now)
        if not waiting:
            assert decision is None
            return
        layer = waiting[0][1]
        assert b.layers() == list(dict.fromkeys(request[1] for request in waiting))
        could_begin = now if could_begin is None else could_begin
        if isinstance(decision, Wait):
            assert now < decision.until <= could_begin + WINDOW_S + 1e-9
            assert decision.connection not in present, "it waits for one that is here"
            assert decision.connection in connections
            return
        assert decision == Compute(layer)
        batch = [request for request in waiting if request[1] == layer]
        assert b.take(layer) == batch
        b.computed(len(batch), 0.1)
        for request in batch:
            waiting.remove(request)
            present.remove(request[0])
            b.answered(request[0], now)
        could_begin = None

    for number, (step, connection, layer, seconds) in enumerate(steps):
        if step == "write":
            request = (connection, layer, number)
            b.admit(request, connection, layer, now)
            waiting.append(request)
            present.append(connection)
            connections.add(connection)
        elif step == "gone" and connection not in present:
            connections.discard(connection)
            b.keep(connections)
        else:
            now += seconds
            look()
    while waiting:
        look()
        now += WINDOW_S
    assert b.layers() == []
    assert b.decide(now) is None


def state(batcher: Batcher) -> object:
    """All that a policy knows, but its last batch."""

    def plain(value: object) -> object:
        if isinstance(value, Companion):
            return [getattr(value, name) for name in Companion.__slots__]
        return (
            {name: plain(one) for name, one in value.items()} if isinstance(value, dict) else value
        )

    known = {name: plain(one) for name, one in vars(batcher._policy).items() if name != "_queue"}
    if "_cost" in known:
        known["_cost"] = vars(known["_cost"])
    return known


@given(
    st.sampled_from(MODES),
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, LAYERS - 1), st.sampled_from([0.0, 0.125, 0.25]),
            st.booleans(), st.sampled_from(["", "", "", "gone"]),
        ),
        max_size=60,
    ),
)  # fmt: skip
def test_a_request_that_never_waits_is_as_if_queued(mode: str, steps) -> None:
    """It waits for nobody, and the policy knows the same afterwards."""
    ours, wanted = batcher(mode), batcher(mode)
    now = 0.0
    connections: set[str] = set()
    for connection, layer, seconds, joins, gone in steps:
        now += seconds
        connections.add(connection)
        if gone:
            connections = {connection}
            for b in (ours, wanted):
                b.keep(connections)
        is_alone = ours.never_waits(len(connections))
        for b in (ours, wanted):
            if b is ours and is_alone:
                b.computed_alone(connection, layer, 1, now, now + 0.125)
                continue
            b.admit((connection,), connection, layer, now)
            end = now
            decision = b.decide(end)
            assert not is_alone or decision == Compute(layer)
            while isinstance(decision, Wait):
                if joins:
                    b.admit((decision.connection,), decision.connection, layer, end)
                end = end if joins else decision.until
                decision = b.decide(end)
            answer(b, end, 0.125)
        assert state(ours) == state(wanted)
        now += 2.0


@given(
    st.sampled_from(MODES),
    st.lists(st.tuples(st.integers(0, LAYERS - 1), st.floats(0, 0.4), st.booleans()), max_size=60),
)
def test_a_lone_client_never_waits(mode: str, steps) -> None:
    b = batcher(mode)
    now = 0.0
    for layer, seconds, more in steps:
        b.admit(("a",), "a", layer, now)
        if not more:
            while b.layers():
                answer(b, now, 0.1)
                now += 0.1
        now += seconds


# -- window ---------------------------------------------------------------------------------------


def two_in_step(b: Batcher, now: float, layer: int, *, apart: float, took_s: float) -> float:
    """a writes, b writes later; returns the time when both are answered."""
    b.admit(("a",), "a", layer, now)
    decision = b.decide(now)
    if isinstance(decision, Wait) and decision.until > now + apart:
        assert decision.connection == "b"
        now += apart
        b.admit(("b",), "b", layer, now)
        answer(b, now, took_s)
        return now + took_s
    if isinstance(decision, Wait):
        now = decision.until
    answer(b, now, took_s)
    now += took_s
    b.admit(("b",), "b", layer, now)
    answer(b, now, took_s)
    return now + took_s


def test_window_learns_to_wait_for_a_punctual_connection() -> None:
    b = batcher("window", layers=1000)
    now, times = 0.0, []
    for layer in range(100):
        before = now
        now = two_in_step(b, now, layer, apart=0.01, took_s=0.1) + 0.02
        times.append(now - before)
    # Alone and alone again takes 0.2; together 0.11.
    assert all(time == pytest.approx(0.13) for time in times[2:])


def test_window_stops_waiting_for_a_late_connection() -> None:
    b = batcher("window", layers=1000)
    now, waits = 0.0, 0
    for layer in range(1000):
        before = now
        now = two_in_step(b, now, layer, apart=0.09, took_s=0.1) + 0.02
        waits += now - before > 0.221
    assert waits <= 12  # 1, 2, 4, ... 256 chances apart


def test_window_tries_again_after_the_end_of_a_step() -> None:
    b = batcher("window", layers=10)
    now, together = 0.0, 0
    for call in range(200):
        before = now
        layer = call % 10
        late = layer == 0
        now = two_in_step(b, now, layer, apart=0.3 if late else 0.01, took_s=0.1) + 0.02
        together += now - before < 0.14
    assert together > 120  # of 180


def test_window_does_not_wait_if_a_joint_batch_saves_nothing() -> None:
    b = batcher("window", layers=1000)
    now, joint = 0.0, 0
    for layer in range(500):
        b.admit(("a",), "a", layer, now)
        if isinstance(b.decide(now), Wait):
            joint += 1
            now += 0.01
            b.admit(("b",), "b", layer, now)
            answer(b, now, 0.2)
            now += 0.2
        else:
            answer(b, now, 0.1)
            b.admit(("b",), "b", layer, now + 0.1)
            answer(b, now + 0.1, 0.1)
            now += 0.2
    # A joint batch shows what it costs; it is tried again when that is forgotten.
    assert joint < 25


def test_window_does_not_wait_for_another_layer_or_with_other_work() -> None:
    b = batcher("window", layers=10)
    for layer in (0, 1, 2):
        b.admit(("a",), "a", layer, 0.0)
        b.admit(("b",), "b", layer, 0.0)
        answer(b, 0.0, 0.1)
    b.admit(("a",), "a", 5, 1.0)
    assert b.decide(1.0) == Compute(5)
    answer(b, 1.0, 0.1)
    b.admit(("a",), "a", 3, 2.0)
    assert isinstance(b.decide(2.0), Wait)
    b.admit(("c",), "c", 7, 2.01)
    assert b.decide(2.01) == Compute(3)


def test_window_forgets_gone_connections() -> None:
    b = batcher("window", layers=10)
    for name in ("a", "b"):
        b.admit((name,), name, 0, 0.0)
    answer(b, 0.0, 0.1)
    b.admit(("a",), "a", 1, 1.0)
    assert isinstance(b.decide(1.0), Wait)
    b.keep(["a"])
    assert b.decide(1.0) == Compute(1)


@given(st.floats(0, 1), st.floats(0, 1e-2), st.lists(st.integers(1, 256), min_size=30, max_size=90))
def test_batch_cost_fits_fixed_and_token_cost(fixed: float, slope: float, sizes: list[int]) -> None:
    cost = BatchCost()
    for tokens in sizes:
        cost.observe(tokens, fixed + slope * tokens)
    usual = max(fixed + slope * tokens for tokens in sizes)
    assert 0 <= cost.fixed_s <= usual + 1e-9
    if len(set(sizes[-20:])) > 10:
        assert cost.fixed_s == pytest.approx(fixed, abs=1e-6 + usual * 1e-6)


def test_batch_cost_of_equal_batches_is_fixed() -> None:
    cost = BatchCost()
    for _ in range(50):
        cost.observe(8, 0.3)
    assert cost.fixed_s == pytest.approx(0.3)
    for _ in range(10):
        cost.observe(16, 0.6)
    assert cost.fixed_s == pytest.approx(0.0, abs=1e-9)


def test_skipped_chances_double() -> None:
    companion = Companion()
    tried_at = []
    for chance in range(2000):
        if companion.is_worth_a_try():
            tried_at.append(chance)
            companion.tried(came=False)
    gaps = [after - before - 1 for before, after in itertools.pairwise(tried_at)]
    assert gaps == [2, 4, 8, 16, 32, 64, 128] + [256] * (len(gaps) - 7)
    companion.tried(came=True)
    assert companion.is_worth_a_try()


# -- all ------------------------------------------------------------------------------------------


def test_all_waits_until_all_active_have_written_then_computes_them_all() -> None:
    b = batcher("all")
    for name in "abc":
        b.admit((name,), name, 0, 0.0)
    assert answer(b, 0.0) == (0, [("a",), ("b",), ("c",)])
    b.admit(("a",), "a", 1, 0.1)
    decision = b.decide(0.1)
    assert isinstance(decision, Wait)
    assert decision.connection in "bc"
    b.admit(("b",), "b", 2, 0.2)
    assert b.decide(0.2) == Wait("c", 0.5)
    b.admit(("c",), "c", 1, 0.3)
    assert answer(b, 0.3) == (1, [("a",), ("c",)])
    # b's layer is of the same round: no wait for a and c, who have just been answered.
    assert answer(b, 0.3) == (2, [("b",)])
    # The next round begins anew.
    b.admit(("a",), "a", 2, 0.4)
    assert isinstance(b.decide(0.4), Wait)


def test_all_waits_once_for_a_connection_that_fell_silent() -> None:
    """Active: it was answered, and has been silent for less than the window since then."""
    b = batcher("all")
    for name in "ab":
        b.admit((name,), name, 0, 0.0)
    answer(b, 0.0)
    held = 0.0
    now = 0.1
    for _ in range(20):
        b.admit(("a",), "a", 0, now)
        decision = b.decide(now)
        if isinstance(decision, Wait):
            assert decision.connection == "b"
            held += decision.until - now
            now = decision.until
        answer(b, now)
        now += 0.1
    assert held == pytest.approx(WINDOW_S - 0.1)
    b.admit(("a",), "a", 0, now)
    b.admit(("b",), "b", 0, now)
    answer(b, now)
    now += 0.1
    b.admit(("a",), "a", 0, now)
    assert isinstance(b.decide(now), Wait), "it came back: it is active again"
    b.keep(["a"])
    assert b.decide(now) == Compute(0)


def test_all_does_not_wait_for_a_connection_without_an_answer() -> None:
    b = batcher("all")
    b.admit(("a",), "a", 0, 0.0)
    answer(b, 0.0)
    b.admit(("a",), "a", 1, 0.1)
    assert b.decide(0.1) == Compute(1)


CALLS, ROUNDS, STEP_END_S = 16, 60, 2e-3


def simulate(
    mode: str,
    window_s: float,
    clients: int,
    pause_s: float,
    batch_s: Callable[[int], float],
    seed: int,
) -> tuple[float, float]:
    """Mean latency of a call in seconds, calls per second.

    Each client calls layer after layer, with a pause in between (10 % more or less), and a longer one at
    the end of each step.
    """
    rng = random.Random(seed)
    batcher = create_batcher(mode, window_s, CALLS)  # type: ignore[arg-type]
    order = itertools.count()
    writes = [(rng.random() * pause_s / 2, next(order), client) for client in range(clients)]
    heapq.heapify(writes)
    calls, sent = [0] * clients, [0.0] * clients
    latencies: list[float] = []
    now = 0.0
    while True:
        while writes and writes[0][0] <= now:
            sent_at, _, client = heapq.heappop(writes)
            sent[client] = sent_at
            batcher.admit(client, client, calls[client] % CALLS, now)
        decision = batcher.decide(now)
        if decision is None:
            if not writes:
                return statistics.mean(latencies), len(latencies) / now
            now = writes[0][0]
            continue
        if isinstance(decision, Wait):
            coming = [at for at, _, client in writes if client == decision.connection]
            now = min([decision.until + 1e-6, *(max(at, now) for at in coming)])
            continue
        batch = batcher.take(decision.layer)
        now += batch_s(len(batch))
        batcher.computed(len(batch), batch_s(len(batch)))
        for client in batch:
            batcher.answered(client, now)
            latencies.append(now - sent[client])
            calls[client] += 1
            pause = pause_s * rng.uniform(0.9, 1.1)
            if calls[client] % CALLS == 0:
                pause += STEP_END_S * rng.uniform(0.9, 1.1)
            if calls[client] < ROUNDS * CALLS:
                heapq.heappush(writes, (now + pause, next(order), client))
        batcher.keep({client for client in range(clients) if calls[client] < ROUNDS * CALLS})


def weights_once(requests: int) -> float:
    return 300e-6 + 20e-6 * requests


def sum_of_parts(requests: int) -> float:
    return 300e-6 * requests


@pytest.mark.parametrize(
    ("batch_s", "clients", "pause_us", "latency", "throughput"),
    [
        (weights_once, 1, 50, 1.0, 1.0),
        (weights_once, 2, 50, 0.8, 1.2),
        (weights_once, 4, 50, 0.6, 1.5),
        (weights_once, 8, 150, 1.0, 1.0),
        (weights_once, 4, 1000, 1.05, 0.97),
        (sum_of_parts, 2, 50, 1.05, 0.97),
        (sum_of_parts, 4, 150, 1.05, 0.97),
    ],
)
def test_window_pays_if_weights_are_read_once_and_costs_little_otherwise(
    batch_s: Callable[[int], float],
    clients: int,
    pause_us: int,
    latency: float,
    throughput: float,
) -> None:
    """Relative to `immediate`: latency at most, throughput at least."""

    def mean(mode: str, window_s: float) -> tuple[float, float]:
        runs = [simulate(mode, window_s, clients, pause_us * 1e-6, batch_s, s) for s in range(3)]
        return statistics.mean(r[0] for r in runs), statistics.mean(r[1] for r in runs)

    base, window, all_active = mean("immediate", 0), mean("window", 1e-3), mean("all", 5e-3)
    for name, found in (("window", window), ("all", all_active)):
        print(f"{name}: latency {found[0] / base[0]:.2f}, throughput {found[1] / base[1]:.2f}")
    assert window[0] <= latency * base[0] * (1 + 1e-9)
    assert window[1] >= throughput * base[1] * (1 - 1e-9)

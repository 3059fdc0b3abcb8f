"""Flags inside one process: bounds, values, waits, doorbells, signals."""

import mmap
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from eaas.wire._flags import Flags

FLAGS = 4
BELLS = 2
WAIT_FOR_EVER_US = 60_000_000
ANY_NONZERO = 0xFFFFFFFE


@pytest.fixture
def flags() -> Iterator[Flags]:
    with mmap.mmap(-1, 4096) as memory:
        flags = Flags(memory, 64, FLAGS, 1024, BELLS)
        yield flags
        flags.release()


def wait(flags: Flags, *, seen_seq: int = -1, spin_us: int = 0, timeout_us: int) -> list[int]:
    return flags.wait(0, FLAGS, ANY_NONZERO, 0, seen_seq, spin_us, timeout_us)


@pytest.mark.parametrize(
    ("flags_offset", "count", "doorbells_offset", "doorbells"),
    [
        (32, 4, 1024, 1),  # not aligned
        (64, 4, 1000, 1),
        (-64, 4, 1024, 1),
        (0, 0, 1024, 1),
        (0, -1, 1024, 1),
        (0, 65, 0, 1),  # one line too many
        (4096, 1, 0, 1),
        (0, 1, 4032, 2),
        (0, 2**62, 0, 1),  # 64 * 2**62 would wrap around
        (2**63 - 64, 1, 0, 1),
    ],
)
def test_lines_outside_the_buffer_are_refused(
    flags_offset: int, count: int, doorbells_offset: int, doorbells: int
) -> None:
    with mmap.mmap(-1, 4096) as memory, pytest.raises(ValueError, match="offset"):
        Flags(memory, flags_offset, count, doorbells_offset, doorbells)


def test_the_whole_buffer_may_be_used_if_it_can_be_written() -> None:
    with mmap.mmap(-1, 4096) as memory:
        flags = Flags(memory, 0, 63, 4032, 1)
        assert flags.exchange(62, 5) == 0
        assert memory[62 * 64] == 5
        flags.release()
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as memory, pytest.raises(BufferError):
        Flags(memory, 0, 1, 64, 1)


@pytest.mark.parametrize("i", [-1, FLAGS, 2**31, 2**63])
def test_an_unknown_flag_or_doorbell(flags: Flags, i: int) -> None:
    flag = (flags.load, lambda i: flags.exchange(i, 1), lambda i: flags.compare_exchange(i, 0, 1))
    for call in (*flag, flags.ring, flags.interrupt, flags.seq):
        with pytest.raises(IndexError):
            call(i)
    with pytest.raises(IndexError):
        flags.ring(BELLS)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 1), (-1, 1), (1, -1), (1, 2**62)])
def test_a_range_outside_the_flags(flags: Flags, first: int, count: int) -> None:
    with pytest.raises(IndexError):
        flags.scan(first, count, 1)
    with pytest.raises(IndexError):
        flags.wait(first, count, 1, 0, -1, 0, 0)


@pytest.mark.parametrize("value", [-1, 32, 2**32, 2**63])
def test_a_value_beyond_the_mask(flags: Flags, value: int) -> None:
    for call in (flags.exchange, lambda i, value: flags.compare_exchange(i, 0, value)):
        with pytest.raises((ValueError, OverflowError)):
            call(0, value)
    assert flags.load(0) == 0


@pytest.mark.parametrize("arguments", [(-1, 0, -1), (2**32, 0, -1), (1, -1, -1), (1, 0, 2**32)])
def test_wait_refuses_invalid_arguments(flags: Flags, arguments: tuple[int, int, int]) -> None:
    mask, timeout_us, seen_seq = arguments
    with pytest.raises(ValueError, match=r"must be|out of range"):
        flags.wait(0, 1, mask, 0, seen_seq, 0, timeout_us)


def test_scan_finds_only_values_of_the_mask(flags: Flags) -> None:
    for i, value in enumerate((1, 2, 31, 1)):
        flags.exchange(i, value)
    assert flags.scan(0, FLAGS, 1 << 1) == [0, 3]
    assert flags.scan(1, 3, 1 << 1 | 1 << 31) == [2, 3]
    assert flags.scan(0, FLAGS, 1) == []
    assert flags.scan(FLAGS, 0, ANY_NONZERO) == []


@pytest.mark.parametrize("wild", [32, 33, 64, 2**32 - 1])
def test_a_wild_value_matches_no_mask(wild: int) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[0:4] = wild.to_bytes(4, "little")
        flags = Flags(memory, 0, 1, 64, 1)
        assert flags.load(0) == wild
        assert flags.scan(0, 1, 2**32 - 1) == []
        assert flags.wait(0, 1, 2**32 - 1, 0, -1, 0, 1000) == []
        flags.release()


@pytest.mark.parametrize("spin_us", [0, 20, -1])
@pytest.mark.parametrize("timeout_us", [0, 1, 30_000, 250_000])
def test_a_wait_ends_at_its_timeout_and_not_before(
    flags: Flags, spin_us: int, timeout_us: int
) -> None:
    start = time.monotonic_ns()
    assert wait(flags, spin_us=spin_us, timeout_us=timeout_us) == []
    assert time.monotonic_ns() - start >= timeout_us * 1000


def test_a_ready_flag_needs_no_wait(flags: Flags) -> None:
    flags.exchange(2, 1)
    assert wait(flags, timeout_us=0) == [2]
    # A ready flag comes before a doorbell that rang.
    assert wait(flags, seen_seq=flags.seq(0) + 1, timeout_us=0) == [2]


def test_a_changed_seq_ends_the_wait(flags: Flags) -> None:
    seen = flags.seq(0)
    flags.interrupt(0)
    assert wait(flags, seen_seq=seen, timeout_us=WAIT_FOR_EVER_US) == []
    start = time.monotonic_ns()
    assert wait(flags, seen_seq=flags.seq(0), timeout_us=20_000) == []
    assert time.monotonic_ns() - start >= 20_000_000


def test_the_seq_wraps_around(flags: Flags) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[64:68] = b"\xff" * 4
        flags = Flags(memory, 0, 1, 64, 1)
        assert flags.seq(0) == 2**32 - 1
        assert flags.wait(0, 1, 2, 0, 2**32 - 1, 0, 1000) == []
        flags.interrupt(0)
        assert flags.seq(0) == 0
        flags.release()


def test_ring_moves_the_seq_only_for_sleepers(flags: Flags) -> None:
    for _ in range(3):
        seen = flags.seq(0)
        flags.ring(0)
        assert flags.seq(0) == seen
        assert wait(flags, timeout_us=1000) == []  # A past sleeper.


@pytest.mark.parametrize("spin_us", [0, 20, -1])
def test_interrupt_wakes_every_waiter(flags: Flags, spin_us: int) -> None:
    """At once: without a wake-up a waiter checks after 250 ms only."""
    rounds, waiters = 20, 3

    def waiter(seen: int) -> int:
        assert wait(flags, seen_seq=seen, spin_us=spin_us, timeout_us=WAIT_FOR_EVER_US) == []
        return time.monotonic_ns()

    late = 0
    with ThreadPoolExecutor(waiters) as pool:
        for _ in range(rounds):
            seen = flags.seq(0)
            woken = [pool.submit(waiter, seen) for _ in range(waiters)]
            time.sleep(0.005)
            rung_at = time.monotonic_ns()
            flags.interrupt(0)
            late += sum(future.result(30) - rung_at > 50_000_000 for future in woken)
    assert late <= rounds * waiters // 10


def test_rings_for_others_do_not_end_a_wait_without_seq(flags: Flags) -> None:
    results: list[list[int]] = []

    def waiter() -> None:
        results.append(flags.wait(0, 1, 1 << 1, 0, -1, 0, WAIT_FOR_EVER_US))

    thread = threading.Thread(target=waiter)
    thread.start()
    for _ in range(50):
        flags.interrupt(0)
        time.sleep(0.001)
    assert results == []
    flags.exchange(0, 1)
    flags.ring(0)
    thread.join(10)
    assert results == [[0]]


def test_sleeping_burns_no_cpu(flags: Flags) -> None:
    before = time.thread_time()
    wait(flags, timeout_us=500_000)
    assert time.thread_time() - before < 0.1


@pytest.mark.parametrize("spin_us", [0, -1])
def test_a_signal_ends_a_long_wait(flags: Flags, spin_us: int) -> None:
    """Raised in another thread, so that it may reach one outside the futex."""

    def press_ctrl_c() -> None:
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=press_ctrl_c)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait(flags, spin_us=spin_us, timeout_us=WAIT_FOR_EVER_US)
    finally:
        thread.join()


def test_a_signal_whose_handler_returns_does_not_end_the_wait(flags: Flags) -> None:
    handled: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: handled.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        start = time.monotonic_ns()
        assert wait(flags, timeout_us=150_000) == []
        assert time.monotonic_ns() - start >= 150_000_000
        assert handled
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_after_release_nothing_works_and_the_buffer_can_be_closed() -> None:
    memory = mmap.mmap(-1, 4096)
    flags = Flags(memory, 0, 1, 64, 1)
    with pytest.raises(BufferError):
        memory.close()
    flags.release()
    flags.release()
    memory.close()
    for call in (
        lambda: flags.load(0),
        lambda: flags.exchange(0, 1),
        lambda: flags.compare_exchange(0, 0, 1),
        lambda: flags.ring(0),
        lambda: flags.interrupt(0),
        lambda: flags.seq(0),
        lambda: flags.scan(0, 1, 1),
        lambda: flags.wait(0, 1, 1, 0, -1, 0, 0),
    ):
        with pytest.raises(ValueError, match="released"):
            call()


@pytest.mark.parametrize("spin_us", [0, -1])
def test_release_under_a_waiting_thread_keeps_the_buffer_until_it_left(spin_us: int) -> None:
    memory = mmap.mmap(-1, 4096)
    flags = Flags(memory, 0, 1, 64, 1)
    errors: list[str] = []
    entered = threading.Event()

    def waiter() -> None:
        entered.set()
        try:
            flags.wait(0, 1, 2, 0, -1, spin_us, WAIT_FOR_EVER_US)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=waiter)
    thread.start()
    entered.wait()
    time.sleep(0.02)
    flags.release()
    thread.join(10)
    assert errors == ["the flags were released"]
    memory.close()

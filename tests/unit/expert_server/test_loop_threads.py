"""The loop and its clients in threads, while slots are revoked."""

import random
import threading
import time

import pytest

from eaas.wire import SlotState
from eaas.wire.slot import DOORBELL, Status
from waiting import eventually

ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
CLIENTS, CALLS = 3, 60


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("batching", ["immediate", "window", "all"])
def test_slots_change_hands_under_load(benches, native_kernel, batching, is_compiled) -> None:
    """The compiled turn takes no checksums."""
    bench = benches(batching, window_s=0.002, kernel=native_kernel if is_compiled else None)
    bench.loop._clock = time.monotonic
    answers: list[int] = []
    faults: list[BaseException] = []
    ended = threading.Event()

    def guarded(work, *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                faults.append(error)
                raise

        return threading.Thread(target=run)

    def client(name: str, seed: int) -> None:
        rng = random.Random(seed)
        grant = None
        for call in range(1, CALLS + 1):
            # Reconnects after a loss, and sometimes without one (as after a crash).
            while grant is None or rng.random() < 0.1:
                grant = bench.table.grant(name, 1, 2)
                time.sleep(0.0001)
            slot, value = grant.first_slot + rng.randrange(2), rng.randint(1, 9)
            seen = bench.arena.flags.seq(grant.reply_doorbell)
            image = bench.image(
                grant, value, layer=call % 4, request_id=call, checksum=not is_compiled
            )
            # A client checks before it writes. Here both are one step, so that the test knows the right
            # answer.
            with bench.table._lock:
                if grant.connection_id not in bench.table._grants:
                    grant = None
                    continue
                bench.put(slot, image)
                assert bench.arena.client_write_done(slot)
            bench.arena.flags.ring(DOORBELL)
            deadline = time.monotonic() + 20
            while not bench.arena.flags.wait(
                slot, 1, ANSWERED, grant.reply_doorbell, seen, 20, 1_000_000
            ):
                seen = bench.arena.flags.seq(grant.reply_doorbell)
                if bench.arena.generation(slot) != grant.generation:
                    break
                assert time.monotonic() < deadline, "no answer"
            with bench.table._lock:
                if grant.connection_id not in bench.table._grants:
                    grant = None
                    continue
                status, rows_TH = bench.take(grant, slot, request_id=call, checksum=not is_compiled)
            assert status is Status.OK
            assert (rows_TH == 4 * value).all()
            answers.append(value)

    def monitor() -> None:
        rng = random.Random(0)
        while not ended.wait(0.003):
            bench.table.revoke_incarnations(f"client-{rng.randrange(CLIENTS)}", 1)

    loop = guarded(bench.loop.run)
    revoking = guarded(monitor)
    clients = [guarded(client, f"client-{i}", i) for i in range(CLIENTS)]
    for thread in (loop, revoking, *clients):
        thread.start()
    for thread in clients:
        thread.join(60)
    ended.set()
    revoking.join(10)
    # Requests of clients that lost their slots may still be queued, to be dropped.
    eventually(lambda: not bench.loop.in_flight, 20)
    bench.loop.stop()
    loop.join(10)
    assert not faults
    assert not any(thread.is_alive() for thread in (loop, revoking, *clients))
    assert len(answers) > CLIENTS * CALLS // 4
    assert bench.loop.in_flight == 0
    bench.table.revoke_all()
    assert bench.table.grant("last", 1, bench.slots) is not None

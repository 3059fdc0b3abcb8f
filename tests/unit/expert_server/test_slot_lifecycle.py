"""Random clients on a real arena, table and loop: they connect, write, crash and return; slots are revoked at
any moment; the server restarts.

Invariants: no slot leaks; each answer is right or dropped; no request of an old generation is answered into a
new one.
"""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eaas.wire import SlotState
from eaas.wire.slot import Status
from expert_server.transports.slot_ownership import Grant

NAMES = st.sampled_from("abc")
ANY = st.integers(0, 5)
# Place in the grant, value, layer, budget in microseconds.
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 9),
        st.integers(0, 1),
        st.sampled_from([10**9, 10**9, 10**9, 0]),
    ),
    min_size=1,
    max_size=3,
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["revoke", "connect", "ask", "zombie"]), NAMES), max_size=3
)
MOMENTS = ["accept", "kernel", "write_answer", "hand_over", "release"]
UNFINISHED, ZOMBIE = 10, 11


@dataclass
class Client:
    """A client's grant, and its requests by slot (request id, value)."""

    grant: Grant
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)


class SlotLifecycle(RuleBasedStateMachine):
    """See the module."""

    benches: type

    @initialize(batching=st.sampled_from(["immediate", "window", "all"]))
    def begin(self, batching: str) -> None:
        self.batching = batching
        self.incarnation = self.request_id = 0
        self.start()

    def start(self) -> None:
        self.bench = self.benches(self.batching, window_s=1e-4)
        self.clients: dict[str, Client] = {}
        self.zombies: list[Grant] = []
        # Events during the loop's next step: before its verbs, and while it computes.
        self.soon: dict[str, list[tuple[str, str]]] = {}
        kernel = self.bench.kernel

        def compute(x_TH: torch.Tensor, *rest: object) -> torch.Tensor:
            assert (x_TH < UNFINISHED).all(), "computed what no living owner has written"
            return kernel(x_TH, *rest)

        self.bench.watch(self.happen)
        self.bench.loop._kernel = compute
        kernel.on_call = lambda: self.happen("kernel")

    def happen(self, when: str) -> None:
        for what, name in self.soon.pop(when, []):
            if what == "revoke":
                self.revoke(name)
            elif what == "zombie":
                self.zombie_writes(ord(name), 0)
            else:
                self.connect(name, 3)
            if what == "ask" and name in self.clients:
                self.write(self.clients[name], [(place, 5, 0, 10**9) for place in range(3)])

    # -- clients --------------------------------------------------------------------------------------

    @rule(name=NAMES, slots=st.integers(1, 3))
    def connect(self, name: str, slots: int) -> None:
        """Connect, even if it is connected already or has crashed: its former slots are freed."""
        self.incarnation += 1
        self.clients.pop(name, None)
        grant = self.bench.table.grant(name, self.incarnation, slots)
        if grant is not None:
            self.clients[name] = Client(grant)
            for slot in range(grant.first_slot, grant.first_slot + slots):
                assert self.bench.arena.flags.load(slot) == SlotState.FREE
                assert self.bench.arena.generation(slot) == grant.generation

    @rule(
        name=NAMES,
        slots=st.integers(1, 3),
        requests=REQUESTS,
        steps=st.integers(0, 3),
        events=st.fixed_dictionaries(dict.fromkeys(MOMENTS, EVENTS)),
    )
    def ask(
        self,
        name: str,
        slots: int,
        requests: list[tuple[int, int, int, int]],
        steps: int,
        events: dict[str, list[tuple[str, str]]],
    ) -> None:
        """Connect if necessary, write, and let the loop run for a while.

        One rule, since hypothesis leaves rules out of most runs.
        """
        if name not in self.clients:
            self.connect(name, slots)
        if name in self.clients:
            self.write(self.clients[name], requests)
        self.soon = dict(events)
        for _ in range(steps):
            self.step()
        self.read()

    def write(self, client: Client, requests: list[tuple[int, int, int, int]]) -> None:
        for place, value, layer, budget_us in requests:
            slot = client.grant.first_slot + place % client.grant.slots
            if self.is_usable(client, slot):
                self.request_id += 1
                image = self.image(client.grant, value, layer, budget_us)
                self.bench.put(slot, image)
                assert self.bench.arena.client_write_done(slot)
                client.asked[slot] = (self.request_id, value)

    @precondition(lambda self: self.clients)
    @rule(who=ANY, place=ANY, share=st.floats(0, 1))
    def crash(self, who: int, place: int, share: float) -> None:
        """Crash in the middle of writing a request, unnoticed by the server."""
        name, client = list(self.clients.items())[who % len(self.clients)]
        slot = client.grant.first_slot + place % client.grant.slots
        if self.is_usable(client, slot):
            image = self.image(client.grant, UNFINISHED)
            self.bench.put(slot, image[: int(share * len(image))])
        del self.clients[name]

    @rule(who=ANY, place=ANY)
    def zombie_writes(self, who: int, place: int) -> None:
        """A suspended client that lost its slots writes after its generation check. The new owner cannot use
        the slot until it connects again.
        """
        if not self.zombies:
            return
        grant = self.zombies[who % len(self.zombies)]
        slot = grant.first_slot + place % grant.slots
        if self.bench.arena.flags.load(slot) == SlotState.FREE:
            self.bench.put(slot, self.image(grant, ZOMBIE))
            assert self.bench.arena.client_write_done(slot)

    def is_usable(self, client: Client, slot: int) -> bool:
        return slot not in client.asked and self.bench.arena.flags.load(slot) == SlotState.FREE

    def image(self, grant: Grant, value: int, layer: int = 0, budget_us: int = 10**9) -> bytearray:
        return self.bench.image(
            grant,
            value,
            tokens=1 + value % 3,
            layer=layer,
            request_id=self.request_id,
            checksum=True,
            budget_us=budget_us,
        )

    def read(self) -> None:
        """All clients read their answers."""
        for name, client in tuple(self.clients.items()):
            for slot, (request_id, value) in tuple(client.asked.items()):
                state = self.bench.arena.flags.load(slot)
                if state == SlotState.WRITTEN:
                    continue
                # Live clients here hold valid grants.
                assert state == SlotState.DONE, name
                del client.asked[slot]
                tokens = 1 + value % 3
                status, rows_TH = self.bench.take(
                    client.grant, slot, request_id=request_id, tokens=tokens, checksum=True
                )
                assert status in (Status.OK, Status.EXPIRED)
                if status is Status.OK:
                    assert rows_TH.shape == (tokens, self.bench.hidden)
                    assert (rows_TH == 4 * value).all()

    # -- the server -----------------------------------------------------------------------------------

    @rule(name=NAMES)
    def revoke(self, name: str) -> None:
        """All incarnations of a client so far are dead; a client that still runs becomes a zombie."""
        client = self.clients.pop(name, None)
        if client is not None:
            self.zombies.append(client.grant)
        self.bench.table.revoke_incarnations(name, self.incarnation)

    @rule()
    def step(self) -> None:
        if self.bench.written() or self.bench.loop.in_flight:
            self.bench.step()

    @rule(really=st.integers(0, 9))
    def restart(self, really: int) -> None:
        """A restarted server has a new arena; connections to the old one are lost."""
        if really == 9:
            self.drain()
            self.start()

    def drain(self) -> None:
        for _ in range(50):
            self.step()
        assert self.bench.loop.in_flight == 0
        self.read()
        # No slot stays reserved.
        self.bench.table.revoke_all()
        last = self.bench.table.grant("last", 1, self.bench.slots)
        assert last is not None, "a slot leaked"
        assert self.bench.table.grants() == [last]
        for slot in range(self.bench.slots):
            assert self.bench.arena.flags.load(slot) == SlotState.FREE

    def teardown(self) -> None:
        self.drain()


@pytest.mark.timeout(300)
def test_slots_over_random_client_lifecycles(benches) -> None:
    SlotLifecycle.benches = benches
    run_state_machine_as_test(SlotLifecycle, settings=settings(stateful_step_count=50))

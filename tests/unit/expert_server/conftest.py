"""A loop with a trivial kernel and no threads: the test acts as the client."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from answer_headers import validate_result
from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.header import payload_layout, result_length
from eaas.wire.slot import (
    CHECKSUM_FLAG,
    DOORBELL,
    Status,
    WireDtype,
    request_views,
    result_view,
    seal,
    verify,
)
from eaas_cli.demo_model import ARCHITECTURES
from expert_server.kernels import ExpertKernel, KernelSpec
from expert_server.kernels.native import NativeKernel
from expert_server.loop.loop import ServeLoop
from expert_server.transports.slot_ownership import Grant, SlotTable
from expert_server.weights.weights import ExpertForm, ExpertWeights
from watched import Watched

HIDDEN, TOP_K, EXPERTS, TOKENS, SLOTS = 8, 2, 4, 4, 6
LAYERS = tuple(f"layer.{i}" for i in range(4))
SHAPE = ModelShape("tiny", EXPERTS, HIDDEN, TOP_K, LAYERS, "float32", "digest")


class Kernel:
    """Each expert multiplies by its number (from 1)."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.breaks_with: Exception = RuntimeError("the kernel broke")
        # Called in the middle of each batch.
        self.on_call: Callable[[], object] = lambda: None

    def __call__(self, x_TH, ids_TK, scores_TK, layer) -> torch.Tensor:
        self.batches.append((layer, len(x_TH)))
        self.on_call()
        if (ids_TK >= EXPERTS).any():
            raise LookupError("not here")
        if layer == 1 and (x_TH == 13).any():
            raise self.breaks_with
        return x_TH.float() * (scores_TK * (ids_TK + 1) * (ids_TK >= 0)).sum(1, keepdim=True)


class Bench:
    """An arena, its table and its loop."""

    hidden, top_k, experts, tokens, slots = HIDDEN, TOP_K, EXPERTS, TOKENS, SLOTS

    def __init__(
        self,
        batching: str = "immediate",
        window_s: float = 0.0,
        latency_s: float = 0.0,
        kernel: ExpertKernel | None = None,
    ) -> None:
        total = payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, HIDDEN), 1)
        self.table = SlotTable(self.arena)
        self.kernel = kernel or Kernel()
        self.now = 100.0
        # The compiled turn, which a real kernel has, needs the real clock.
        clock = time.monotonic if kernel else lambda: self.now
        self.loop = ServeLoop(
            self.arena, self.table, self.kernel, SHAPE, 0, batching, window_s, latency_s, clock
        )
        self.loop.epoch = 42

    def watch(self, before: Callable[[str], object]) -> None:
        """Let something happen before each verb that the loop's Python calls; it gets the verb's name."""
        self.loop.slots.verbs = Watched(self.loop.slots.verbs, before)

    def grant(self, client: str, slots: int = 2, incarnation: int = 1) -> Grant:
        grant = self.table.grant(client, incarnation, slots)
        assert grant is not None
        return grant

    # -- the client ---------------------------------------------------------------------------------

    def image(
        self, grant: Grant, x: float, expert: int = 1, *, tokens: int = 2, layer: int = 0,
        request_id: int = 5, dtype: WireDtype = WireDtype.FLOAT32, budget_us: int = 1_000_000,
        checksum: bool = False,
    ) -> bytearray:  # fmt: skip
        """The bytes of a request: header and payload."""
        header = RequestHeader.of(
            dtype=dtype,
            generation=grant.generation,
            request_id=request_id,
            epoch=1,
            budget_us=budget_us,
            layer=layer,
            batch_size=tokens,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            flags=CHECKSUM_FLAG * checksum,
        )
        buffer = bytearray(header.end)
        x_TH, ids_TK, scores_TK = request_views(buffer, 0, header)
        x_TH[...] = x
        ids_TK[...] = expert
        scores_TK[...] = 1
        if checksum:
            seal(buffer, 0, header)
        else:
            header.pack_into(buffer, 0)
        return buffer

    def put(self, slot: int, data: bytes, start: int = 0) -> None:
        """Write bytes into a slot's request area, without its flag."""
        offset = self.arena.request_offset(slot) + start
        self.arena.buffer[offset : offset + len(data)] = bytes(data)

    def write(
        self, grant: Grant, x: float, expert: int = 1, *, slot: int | None = None, **fields
    ) -> int:
        """Write a request."""
        slot = grant.first_slot if slot is None else slot
        self.put(slot, self.image(grant, x, expert, **fields))
        assert self.arena.client_write_done(slot)
        return slot

    def rewrite(self, slot: int, **changes: int) -> None:
        """Change the header in a slot."""
        offset = self.arena.request_offset(slot)
        header = RequestHeader.unpack_from(self.arena.buffer, offset)
        header._replace(**changes).pack_into(self.arena.buffer, offset)

    def result(self, slot: int) -> ResultHeader:
        """The header of the answer in a slot, unchecked."""
        assert self.arena.flags.load(slot) == SlotState.DONE
        return ResultHeader.unpack_from(self.arena.buffer, self.arena.result_offset(slot))

    def rows(self, slot: int) -> np.ndarray:
        """The result in a slot."""
        header = self.result(slot)
        assert header.status == Status.OK
        offset = self.arena.result_offset(slot)
        return result_view(self.arena.buffer, offset, header.rows, HIDDEN).copy()

    def take(
        self,
        grant: Grant,
        slot: int,
        *,
        request_id: int = 5,
        tokens: int = 2,
        checksum: bool = False,
    ) -> tuple[Status, np.ndarray]:
        """Take the answer to a request, as a client does, and free the slot. SlotCorruptError if it is
        invalid.
        """
        header, offset = self.result(slot), self.arena.result_offset(slot)
        try:
            validate_result(
                header,
                result_capacity=self.arena.result_capacity,
                request_id=request_id,
                rows=tokens,
                hidden_size=HIDDEN,
                generation=grant.generation,
            )
            if checksum:
                verify(self.arena.buffer, offset, header)
            rows_TH = result_view(self.arena.buffer, offset, header.rows, HIDDEN).copy()
        finally:
            assert self.arena.client_free(slot)
        return Status(header.status), rows_TH

    # -- the server ---------------------------------------------------------------------------------

    def written(self) -> list[int]:
        """Slots that wait for the server."""
        return self.arena.flags.scan(0, SLOTS, SlotState.WRITTEN.mask)

    def serve(self, *slots: int) -> None:
        """Answer these slots."""
        with torch.inference_mode():
            self.loop.serve(list(slots))

    def step(self) -> None:
        """Run one round of the loop, a millisecond after the last; there must be work."""
        self.now += 0.001
        assert self.written() or self.loop.in_flight
        with torch.inference_mode():
            self.loop.step(self.arena.flags.seq(DOORBELL))


@pytest.fixture(scope="session", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of each architecture, in many shards."""
    return checkpoint(request.param, shard_size="40KB")


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint in many shards, to damage."""
    return Path(shutil.copytree(checkpoint(shard_size="40KB"), tmp_path / "copy"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native_kernel() -> Iterator[NativeKernel]:
    """A kernel with `Kernel`'s results for x >= 0, and compiled layers."""
    form = ExpertForm(False, False, torch.relu)
    kernel = NativeKernel([form] * len(LAYERS), KernelSpec(torch.float32))
    one = torch.eye(HIDDEN)
    for layer in range(len(LAYERS)):
        for expert in range(EXPERTS):
            kernel.load(layer, expert, ExpertWeights(one * (expert + 1), one))
    yield kernel
    kernel.close()


@pytest.fixture
def bench() -> Bench:
    """A bench per test."""
    return Bench()


@pytest.fixture(scope="session")
def benches() -> type[Bench]:
    """Creates benches."""
    return Bench

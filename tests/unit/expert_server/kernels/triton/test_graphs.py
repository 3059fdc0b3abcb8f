"""Batches of few tokens as graphs: captured once for each size, and right whatever is loaded or unloaded."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from expert_layers import FORMS, batch, expert
from expert_server.kernels import KernelSpec
from expert_server.kernels.gpu.tiles import bucket_of
from fake_device import FakeDevice
from interpreted_triton import interpreted_kernel, needs_triton

pytestmark = needs_triton

HIDDEN, INTERMEDIATE = 64, 32
FORM = FORMS["swiglu"]


class Both:
    """A kernel with graphs beside one without."""

    def __init__(self, layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = FakeDevice(can_capture=True)
        make = interpreted_kernel()
        spec = KernelSpec(dtype)
        self.graphs = make([FORM] * layers, spec, self.device)
        self.plain = make([FORM] * layers, spec, FakeDevice())
        self._rng = torch.Generator().manual_seed(0)
        self.dtype = dtype

    def load(self, layer: int, number: int) -> None:
        weights = expert(FORM, HIDDEN, INTERMEDIATE, self.dtype, self._rng)
        for kernel in (self.graphs, self.plain):
            kernel.load(layer, number, weights)

    def unload(self, layer: int, number: int) -> None:
        for kernel in (self.graphs, self.plain):
            kernel.unload(layer, number)

    def check(self, ids: Any, layer: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        """The results have the same bits."""
        ids_TK = torch.tensor(ids)
        one = batch(len(ids_TK), HIDDEN, ids, ids_TK.shape[1], dtype, len(ids_TK))
        assert torch.equal(self.graphs(*one, layer), self.plain(*one, layer))

    def counted(self) -> tuple[int, int]:
        """Captures and replays since the last call."""
        calls = self.device.calls
        counted = calls.pop("capture", 0), calls.pop("replay", 0)
        calls.clear()
        return counted

    def close(self) -> None:
        self.graphs.close()
        self.plain.close()


@pytest.fixture
def made() -> Iterator[Callable[..., Both]]:
    """Makes kernels with experts 0 and 1 in layer 0."""
    with ExitStack() as stack:

        def make(**options: Any) -> Both:
            both = Both(**options)
            stack.callback(both.close)
            for number in range(2):
                both.load(0, number)
            return both

        yield make


@pytest.fixture
def both(made: Callable[..., Both]) -> Both:
    return made()


def test_one_capture_for_each_power_of_two(both: Both) -> None:
    for tokens in (1, 2, 3, 4, 5, 8, 7, 3, 1):
        both.check([[0, 1], *[[1, -1]] * (tokens - 1)])
    # 1, 2, 4 and 8.
    assert both.counted() == (4, 9)
    # Another dtype or number of experts a token has other device code or sizes.
    both.check([[0, 1]] * 8, dtype=torch.float32)
    both.check([[0]] * 8)
    assert both.counted() == (2, 2)


def test_tokens_of_an_earlier_batch_are_not_computed_again(both: Both) -> None:
    both.check([[0, 1]] * 8)
    both.unload(0, 1)
    # The graph's memory still has three rows for the expert that is gone.
    both.check([[0, -1]] * 5)
    with pytest.raises(LookupError, match="expert 1 is not held"):
        both.graphs(torch.ones(5, HIDDEN), torch.tensor([[0, 1]] * 5), torch.ones(5, 2), 0)


def test_loads_and_unloads_need_no_new_capture_and_layers_share_one(made: Any) -> None:
    both = made(layers=2)
    for number in range(3):
        both.load(0, number)
        both.check([[number, -1]] * 4)
    both.load(1, 2)
    both.check([[2, -1], [-1, 2], [-1, -1]], layer=1)
    both.unload(0, 1)
    both.check([[0, 2]] * 4)
    both.load(0, 1)
    both.load(0, 2)
    both.check([[2, 1]] * 4)
    both.check([[2, -1]] * 4, layer=1)
    assert both.counted() == (1, 7)
    # A table of more places is another one.
    both.load(0, 64)
    both.check([[64, 1]] * 4)
    assert both.counted() == (1, 1)


def test_other_tiles_are_another_graph(both: Both) -> None:
    both.check([[0]])
    tiles = both.graphs.tiles
    both.graphs.tiles = {**tiles, "few": tiles["many"]}
    both.check([[0]])
    assert both.counted() == (2, 2)


def test_one_wait_and_the_same_copies(both: Both) -> None:
    one = batch(3, HIDDEN, [[0]] * 3, 1, torch.bfloat16, 0)
    both.graphs(*one, 0)
    both.device.calls.clear()
    both.graphs(*one, 0)
    assert both.device.calls == {"copy to": 2, "replay": 1, "copy back": 1, "wait": 1}


def test_experts_come_and_go_while_graphs_compute_others(both: Both) -> None:
    one = batch(6, HIDDEN, [[0, 1]] * 6, 2, torch.bfloat16, 0)
    right_TH = both.plain(*one, 0)
    weights = expert(FORM, HIDDEN, INTERMEDIATE, both.dtype, torch.Generator().manual_seed(1))
    stop = threading.Event()
    cycles = []

    def churn() -> None:
        while not stop.is_set():
            both.graphs.load(0, 2, weights)
            both.graphs.unload(0, 2)
            cycles.append(1)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            assert torch.equal(both.graphs(*one, 0), right_TH)
    finally:
        stop.set()
        thread.join(30)
    assert cycles
    assert both.counted() == (1, 20)


def test_large_batches_and_too_many_sizes_are_launched_as_before(both, monkeypatch) -> None:
    monkeypatch.setattr("expert_server.kernels.gpu.graphs._MOST_TOKENS", 8)
    monkeypatch.setattr("expert_server.kernels.gpu.graphs._MOST_GRAPHS", 2)
    both.check([[0]] * 9)
    assert both.counted() == (0, 0)
    for tokens in (1, 2, 4, 8, 2):
        both.check([[0]] * tokens)
    assert both.counted() == (2, 3)


def test_a_size_whose_graph_does_not_fit_computes_without(both, monkeypatch, caplog) -> None:

    def fail(issue: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(both.device, "capture", fail)
        both.check([[0]] * 4)
    # It is not tried again, and other sizes have graphs.
    both.check([[0]] * 4)
    both.check([[0]] * 2)
    assert both.counted() == (1, 1)
    assert caplog.text.count("batches of 4 tokens have no CUDA graph: the device is full") == 1


def test_the_tile_follows_from_the_table_not_from_its_padding(both: Both) -> None:
    """A batch with a graph takes the tile that a trial with few experts and the benchmark measure."""
    chosen = []

    def note(rows: int, experts: int) -> str:
        chosen.append((experts, bucket_of(rows, experts)))
        return chosen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("expert_server.kernels.gpu.kernel.bucket_of", note)
        both.check([[0]] * 64)
    assert set(chosen) == {(2, "many")}


def test_a_device_that_cannot_capture_computes_all_the_same(both, monkeypatch, caplog) -> None:
    both.check([[0]])

    def fail(issue: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(both.device, "capture", fail)
    for tokens in (3, 1, 3):
        both.check([[0]] * tokens)
    assert caplog.text.count("without CUDA graphs: operation not permitted") == 1
    assert both.counted() == (1, 1)


def test_the_trial_of_a_starting_server_uses_graphs() -> None:
    """So a graph with wrong results is found before it serves."""
    from expert_server.kernels.trial import ExpertSizes, trial_error

    both = Both(dtype=torch.float32)
    sizes = ExpertSizes(hidden=32, intermediate=16, num_experts=4, top_k=2)
    error = trial_error(both.graphs, FORM, KernelSpec(torch.float32), sizes)
    assert error < 1e-5
    assert both.counted() == (3, 3)
    both.close()

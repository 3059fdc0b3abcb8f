"""Products with dense weights in bfloat16: values, rows alone and together, and what torch still computes."""

from __future__ import annotations

import copy
import threading
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_client.engines.transformers.dense import weights
from attention_client.engines.transformers.dense._dense import has_tiles, multiplies, multiply
from attention_client.engines.transformers.dense.weights import (
    linear,
    shared_pool,
    use_own_products,
)
from emulated_amx import build, missing

pytestmark = pytest.mark.skipif(not multiplies, reason="this processor has no AVX2")

SHAPES = (
    *((1, 1, 1), (2, 3, 15), (3, 5, 17), (5, 31, 16), (7, 33, 100), (50, 130, 257)),
    *((4, 64, 256), (300, 272, 96), (100, 1040, 512), (1, 2000, 1100), (900, 70, 1300)),
)


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def on_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch multiplies bfloat16 fast."""
    monkeypatch.setattr(weights, "multiplies_here", lambda: True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_float64_rounded_once(
    shape: tuple[int, int, int], threads: int
) -> None:
    rows, channels, inputs = shape
    x, weight, bias = drawn(rows, inputs), drawn(channels, inputs, seed=1), drawn(channels, seed=2)
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        found = linear(x, weight, added, shared_pool(threads)).double()
        # Half a unit in the last place of bfloat16, and the float32 sums' own error.
        sums = inputs * 2.0**-24 * F.linear(x.double().abs(), weight.double().abs())
        assert ((found - exact).abs() <= exact.abs() * 2.0**-8 + sums + 2.0**-20).all()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension with emulated tiles, whose checks end the process."""
    if missing("avx512_bf16"):
        pytest.skip(f"the emulation needs {missing('avx512_bf16')}")
    folder = tmp_path_factory.mktemp("emulated")
    return build(folder, "attention_client/engines/transformers/dense", "_dense")


@pytest.mark.parametrize("shape", SHAPES[:-2])
def test_emulated_tiles(emulated: ModuleType, shape: tuple[int, int, int]) -> None:
    rows, channels, inputs = shape
    x, weight, bias = drawn(rows, inputs), drawn(channels, inputs, seed=1), drawn(channels, seed=2)
    out = torch.empty(rows, channels, dtype=torch.bfloat16)
    assert emulated.has_tiles
    assert emulated.multiply(x, weight, bias, out, shared_pool(2))
    assert torch.equal(out, linear(x, weight, bias, shared_pool(1))) or not has_tiles
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(out.double(), exact, rtol=2.0**-8, atol=1e-4 * inputs)


def test_a_row_is_the_same_alone_and_together_and_on_any_threads() -> None:
    x, weight = drawn(200, 300), drawn(120, 300, seed=1)
    together = linear(x, weight, None, shared_pool(3))
    for count in (1, 2, 3, 4, 5, 64, 199):
        parts = [linear(part, weight, None, shared_pool(1)) for part in x.split(count)]
        assert torch.equal(torch.cat(parts), together)


def test_infinities_and_what_is_no_number_stay() -> None:
    x, weight = torch.zeros(5, 20).bfloat16(), torch.ones(5, 20).bfloat16()
    x[0, 19], x[1, 3], x[2, 0] = float("inf"), float("nan"), -float("inf")
    x[3, :2] = torch.finfo(torch.bfloat16).max
    found = linear(x, weight, None, shared_pool(1))
    assert found[[0, 3]].isposinf().all()
    assert found[1].isnan().all()
    assert found[2].isneginf().all()
    assert torch.equal(found[4], torch.zeros(5).bfloat16())


def test_tensors_of_other_layouts_have_the_same_product() -> None:
    x, weight = drawn(6, 2, 40), drawn(40, 12, seed=1)
    pool = shared_pool(1)
    expected = linear(x[:, 1].contiguous(), weight.T.contiguous(), None, pool)
    assert torch.equal(linear(x[:, 1], weight.T.contiguous(), None, pool), expected)
    assert torch.equal(linear(x, weight.T.contiguous(), None, pool)[:, 1], expected)
    wide = torch.cat([weight.T, weight.T], 1)[:, :40]
    assert torch.equal(linear(x[:, 1], wide, None, pool), expected)
    # No row of it is contiguous: torch's.
    assert torch.allclose(linear(x[:, 1], weight.T, None, pool), expected, atol=0.1)
    assert linear(x[:0], wide, None, pool).shape == (0, 2, 12)
    # A sum of nothing.
    bias = drawn(5)
    assert torch.equal(linear(x[:2, 0, :0], drawn(5, 0), bias, pool), bias.expand(2, 5))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight, out, pool = drawn(3, 8), drawn(5, 8), drawn(3, 5), shared_pool(1)
    assert multiply(x, weight, None, out, pool)
    for arguments in (
        (drawn(3, 7), weight, None, out),
        (x, weight, drawn(4), out),
        (x, weight, None, drawn(3, 4)),
        (x, weight, None, drawn(2, 5)),
        (x.float(), weight, None, out),
        (x, weight.float(), None, out),
        (x, weight, None, out.float()),
        (x, weight, None, drawn(5, 3).T),
    ):
        assert not multiply(*arguments, pool)
    with pytest.raises(ValueError, match="PyCapsule"):
        multiply(x, weight, None, out, object())
    with pytest.raises(RuntimeError):
        linear(drawn(3, 7), weight, None, pool)


class _Router(nn.Module):
    """As in transformers: a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(8, 32, seed=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32, dtype=torch.bfloat16)
        self.layer = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.router = _Router()
        self.head = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(tokens))
        return torch.cat([self.head(x), self.router(x)], -1)


@pytest.mark.usefixtures("on_this_processor")
def test_a_model_computes_here_and_keeps_its_tied_weights() -> None:
    model, tokens = _Tied(), torch.arange(50)[None]
    before, names = model(tokens), dict(model.state_dict())
    use_own_products(model, 2)
    with torch.no_grad():
        after = model(tokens)
        alone = torch.cat([model(tokens[:, i : i + 1]) for i in range(50)], 1)
    assert torch.allclose(after, before, atol=0.05, rtol=0.02)
    assert torch.equal(alone, after)
    assert model.head.weight is model.embedding.weight
    assert model.layer.weight.data_ptr() == names["layer.weight"].data_ptr()
    assert names.keys() == model.state_dict().keys()
    assert torch.allclose(copy.deepcopy(model)(tokens), before, atol=0.05, rtol=0.02)


@pytest.mark.usefixtures("on_this_processor")
def test_a_head_still_has_gradients() -> None:
    model = _Tied()
    use_own_products(model, 1)
    model.router.weight.requires_grad_(True)
    model(torch.arange(4)[None]).float().sum().backward()
    assert model.router.weight.grad is not None


@pytest.mark.usefixtures("on_this_processor")
def test_a_model_can_be_traced_and_converted() -> None:
    model = _Tied()
    use_own_products(model, 1)
    tokens = torch.arange(7)[None]
    traced = torch.export.export(model, (tokens,), strict=False).module()
    with torch.no_grad():
        assert torch.allclose(traced(tokens), model(tokens), atol=0.05, rtol=0.02)
        wide = model(tokens).float()
        assert torch.allclose(model.float()(tokens), wide, atol=0.05, rtol=0.02)


def test_threads_of_one_pool_may_multiply_at_the_same_time() -> None:
    x, weight = drawn(64, 512), drawn(512, 512, seed=1)
    expected = linear(x, weight, None, shared_pool(1))
    wrong = []

    def run() -> None:
        for _ in range(50):
            if not torch.equal(linear(x, weight, None, shared_pool(2)), expected):
                wrong.append(1)

    workers = [threading.Thread(target=run) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong

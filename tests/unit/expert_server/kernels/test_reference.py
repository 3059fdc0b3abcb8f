"""Properties of the reference kernel with real weights; test_kernels.py has its corner cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.checkpoint import Checkpoint
from eaas_cli.demo_model import write_demo_model
from expert_server.experts.store import ExpertStore
from expert_server.kernels import KernelSpec, ReferenceKernel
from expert_server.weights.reader import ExpertReader

E, H = 4, 32


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ReferenceKernel:
    path = tmp_path_factory.mktemp("demo") / "x"
    write_demo_model(path, "gpt_oss", layers=1, hidden=H, experts=E, top_k=2, vocab=262)
    reader = ExpertReader(Checkpoint.open(path))
    kernel = ReferenceKernel(reader.forms, KernelSpec(reader.dtype))
    ExpertStore(reader, kernel).load({0: [0, 1, 2]})
    return kernel


def ids(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_poison_stays_in_its_row(kernel: ReferenceKernel, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 6))
    row = data.draw(st.integers(0, tokens - 1))
    poison = data.draw(st.sampled_from([float("nan"), float("inf")]))
    pairs = st.tuples(*[st.sampled_from([-1, 0, 1, 2])] * 2)
    ids_TK = ids(*data.draw(st.lists(pairs, min_size=tokens, max_size=tokens)))
    x_TH = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens))
    scores_TK = torch.ones(tokens, 2)
    clean_TH = kernel(x_TH, ids_TK, scores_TK, 0)
    x_TH[row] = poison
    out_TH = kernel(x_TH, ids_TK, scores_TK, 0)
    others = torch.arange(tokens) != row
    assert torch.equal(out_TH[others], clean_TH[others])
    is_here = bool((ids_TK[row] >= 0).any())
    assert bool(out_TH[row].isfinite().all()) is not is_here


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_is_its_tokens_and_a_token_the_sum_of_its_experts(
    kernel: ReferenceKernel, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 5))
    pairs = st.tuples(*[st.sampled_from([-1, 0, 1, 2])] * 3)  # an expert may come twice
    rows = data.draw(st.lists(pairs, min_size=tokens, max_size=tokens))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x_TH, scores_TK = torch.randn(tokens, H, generator=rng), torch.rand(tokens, 3, generator=rng)
    expected_TH = torch.zeros(tokens, H)
    for token, row in enumerate(rows):
        for k, expert in enumerate(row):
            one = slice(token, token + 1)
            expected_TH[one] += kernel(x_TH[one], ids((expert,)), scores_TK[one, k : k + 1], 0)
    torch.testing.assert_close(
        kernel(x_TH, ids(*rows), scores_TK, 0), expected_TH, atol=1e-5, rtol=1e-5
    )

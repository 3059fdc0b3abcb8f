"""Kernel `triton` on a GPU, against the reference in float64; skipped without one."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
import torch

from expert_layers import TRITON, Candidate, layer, over

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

EXPERTS, TOP_K = 8, 4
each = over(Candidate(one.spec, "gpu") for one in TRITON)


def request(candidate: Candidate, tokens: int, hidden: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS, (tokens * TOP_K,), generator=rng).tolist()
    return candidate.batch(tokens, hidden, ids, TOP_K)


@each
@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 256), (300, 130)])
def test_equals_the_reference(candidate: Candidate, hidden: int, intermediate: int) -> None:
    """Few rows per expert and many; sizes with and without padding."""
    with layer(candidate, "swiglu", hidden, intermediate, EXPERTS) as both:
        for tokens in (1, 7, 64, 300):
            assert both.error(*request(candidate, tokens, hidden)) < candidate.bound, tokens


@each
def test_loads_and_unloads_while_it_computes(candidate: Candidate) -> None:
    """Each answer has the bits of the first: no batch reads memory that a load writes."""
    with layer(candidate, "swiglu", 512, 256, EXPERTS) as both:
        # So few that tiles are small, with either number of experts.
        one = request(candidate, 16, 512)
        right_TH = both.kernel(*one, 0).clone()
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                both.kernel.unload(0, EXPERTS)
                both.kernel.load(0, EXPERTS, both.weights[0])

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(200):
                assert torch.equal(both.kernel(*one, 0), right_TH)
        finally:
            stop.set()
            thread.join()

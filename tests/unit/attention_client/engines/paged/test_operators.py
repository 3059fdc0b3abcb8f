"""Operators of a pass: an error inside one comes out at the end, and later operators do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_client.engines.transformers.paged.operators import reaching
from eaas.errors import ClusterError

X = torch.ones(2, 4)
IDS, SCORES = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
W = torch.arange(12.0).reshape(3, 4)
Q = torch.ones(1, 2, 3, 4)


class Outside:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.calls = 0

    def attend(self, layer: int, q: Any, k: Any, v: Any, *_: Any) -> torch.Tensor:
        self.calls += 1
        return q.transpose(1, 2) + layer

    def routed_experts(self, layer: int, x: Any, ids: Any, scores: Any) -> torch.Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return x + layer

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.calls += 1
        return torch.nn.functional.linear(x, weight, bias)


def experts(layer: int) -> torch.Tensor:
    found: torch.Tensor = torch.ops.eaas.routed_experts(X, IDS, SCORES, layer)
    return found


def attention(layer: int) -> torch.Tensor:
    found: torch.Tensor = torch.ops.eaas.paged_attention(Q, Q, Q, None, layer, 1.0, 0.0)
    return found


def product() -> torch.Tensor:
    found: torch.Tensor = torch.ops.eaas.linear(X, W, None)
    return found


def test_they_reach_what_is_outside() -> None:
    with reaching(Outside()):
        assert torch.equal(experts(3), X + 3)
        assert torch.equal(attention(2), Q.transpose(1, 2) + 2)
        assert torch.equal(product(), X @ W.T)


def a_pass(outside: Outside) -> None:
    with reaching(outside):
        assert torch.equal(experts(0), torch.zeros(2, 4))
        assert torch.equal(attention(0), torch.zeros(1, 3, 2, 4))
        assert torch.equal(experts(1), torch.zeros(2, 4))
        assert torch.equal(product(), torch.zeros(2, 3))


@pytest.mark.parametrize("error", [ClusterError("gone"), KeyboardInterrupt()])
def test_an_error_comes_out_at_the_end(error: BaseException) -> None:
    outside = Outside(error)
    with pytest.raises(type(error)):
        a_pass(outside)
    assert outside.calls == 1
    with reaching(Outside()):
        assert torch.equal(experts(3), X + 3)


def test_outside_of_a_pass_they_refuse() -> None:
    experts(0)
    with pytest.raises(RuntimeError, match="only in a forward pass"):
        a_pass(None)  # type: ignore[arg-type]

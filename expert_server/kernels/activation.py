"""Recognises a model's activation by evaluating it, when an expert server creates its compiled kernel.

A fused kernel needs the formula, but the model only has a callable (built from its config). A formula matches
if it agrees with the callable on a wide range of inputs in float64; the model's name does not matter.

Letters: g gate, u up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.nn import functional

from expert_server.weights.weights import ExpertForm

__all__ = ["Activation", "ActivationKind", "apply_activation", "recognise"]

_WIDTH = 64
_RTOL = 1e-9


class ActivationKind(IntEnum):
    """The formulas; the numbers are shared with the compiled kernel."""

    SILU = 0  # g * sigmoid(g)
    GELU = 1  # g * Phi(g)
    GELU_TANH = 2  # GELU's tanh approximation
    RELU = 3
    RELU_SQUARED = 4
    CLAMPED_SWIGLU = 5  # min(g, limit) * sigmoid(alpha * min(g, limit)) * (clamp(u, limit) + 1)


@dataclass(frozen=True)
class Activation:
    """An expert's activation, which maps the up product to the down product's input.

    Attributes:
        kind: The formula on the gate.
        has_gate: Whether the result is multiplied by `up` (always for CLAMPED_SWIGLU).
        is_interleaved: Gate and up alternate (g0, u0, g1, u1, ...) rather than gate first.
        alpha, limit: Constants of CLAMPED_SWIGLU.
    """

    kind: ActivationKind
    has_gate: bool
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")


def recognise(form: ExpertForm) -> Activation | None:
    """Find the formula of a layer's activation; None: unknown, and the compiled kernel cannot serve it."""
    owner = getattr(form.activate, "__self__", None)
    limit, alpha = getattr(owner, "limit", None), getattr(owner, "alpha", None)
    candidates = [
        Activation(kind, form.has_gate, interleaved)
        for kind in ActivationKind
        for interleaved in ((False, True) if form.has_gate else (False,))
        if kind is not ActivationKind.CLAMPED_SWIGLU
    ]
    if form.has_gate and isinstance(limit, int | float) and isinstance(alpha, int | float):
        candidates += [
            Activation(ActivationKind.CLAMPED_SWIGLU, True, interleaved, float(alpha), float(limit))
            for interleaved in (True, False)
        ]
    probe = _probe()
    with torch.inference_mode():
        wanted = form.activate(probe)
        for candidate in candidates:
            if torch.allclose(apply_activation(candidate, probe), wanted, rtol=_RTOL, atol=_RTOL):
                return candidate
    return None


def apply_activation(activation: Activation, product: torch.Tensor) -> torch.Tensor:
    """Apply an activation in plain torch, to compare it with the model's: (N, 2I) or (N, I) -> (N, I)."""
    if not activation.has_gate:
        return _ungated(activation.kind, product)
    if activation.is_interleaved:
        gate, up = product[..., ::2], product[..., 1::2]
    else:
        gate, up = product.chunk(2, dim=-1)
    if activation.kind is ActivationKind.CLAMPED_SWIGLU:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    return _ungated(activation.kind, gate) * up


def _ungated(kind: ActivationKind, x: torch.Tensor) -> torch.Tensor:
    match kind:
        case ActivationKind.SILU:
            return functional.silu(x)
        case ActivationKind.GELU:
            return functional.gelu(x)
        case ActivationKind.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case ActivationKind.RELU:
            return functional.relu(x)
        case ActivationKind.RELU_SQUARED:
            return functional.relu(x).square()
        case _:
            raise ValueError(f"{kind.name} needs a gate")


def _probe() -> torch.Tensor:
    """Draw inputs to compare: tiny to far beyond any limit, of both signs, gate and up independent."""
    rng = torch.Generator().manual_seed(0)
    magnitude = torch.logspace(-3, 2, 32, dtype=torch.float64)[:, None]
    return magnitude * torch.randn(32, _WIDTH, dtype=torch.float64, generator=rng)

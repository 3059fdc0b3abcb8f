"""Muon for matrices, AdamW for the rest, with float32 masters of the model's bfloat16 weights."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Optimizer"]

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_UPDATE_RMS = 0.2


class Optimizer:
    """One step a batch; the whole state is tensors by name.

    Muon (Jordan et al., 2024) takes the momentum of a matrix to the nearest orthogonal one, so that
    all its directions learn alike: in a short training that is worth a good part more text. Its
    updates are scaled to AdamW's usual size (Liu et al., "Muon is Scalable for LLM Training", 2025,
    section 2.2), so that both use one learning rate.
    """

    def __init__(self, model: Any) -> None:
        self._weights = dict(model.named_parameters())
        self._matrices = [n for n in self._weights if _is_matrix(n, self._weights[n])]
        self.state: dict[str, torch.Tensor] = {}
        for name, weight in self._weights.items():
            self.state[f"master.{name}"] = weight.detach().float().clone()
            self.state[f"momentum.{name}"] = torch.zeros_like(weight, dtype=torch.float32)
            if name not in self._matrices:
                self.state[f"square.{name}"] = torch.zeros_like(weight, dtype=torch.float32)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Resume from a saved `state`; the model's weights become the masters'."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self._write_weights()

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor], step: int, rate: float) -> float:
        """Update the weights from float32 gradients; `step` counts from 1. Returns the gradients' norm."""
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        scale = min(1.0, 1.0 / (norm + 1e-6))
        for name, gradient in gradients.items():
            gradient *= scale
            if name not in self._matrices:
                self._adam(name, gradient, step, rate)
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name in self._matrices:
            shapes.setdefault(tuple(self._weights[name].shape[-2:]), []).append(name)
        for names in shapes.values():
            self._muon(names, gradients, rate)
        self._write_weights()
        return norm

    def _adam(self, name: str, gradient: torch.Tensor, step: int, rate: float) -> None:
        momentum, square = self.state[f"momentum.{name}"], self.state[f"square.{name}"]
        momentum.lerp_(gradient, 1 - _BETAS[0])
        square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        root = (square / (1 - _BETAS[1] ** step)).sqrt_().add_(1e-8)
        master = self.state[f"master.{name}"]
        if gradient.dim() > 1:
            master.mul_(1 - rate * _WEIGHT_DECAY)
        master.addcdiv_(momentum, root, value=-rate / (1 - _BETAS[0] ** step))

    def _muon(self, names: list[str], gradients: dict[str, torch.Tensor], rate: float) -> None:
        """Update all matrices of one shape at once."""
        looked_ahead = []
        for name in names:
            momentum = self.state[f"momentum.{name}"]
            momentum.lerp_(gradients[name], 1 - _MOMENTUM)
            ahead = gradients[name].lerp(momentum, _MOMENTUM)
            looked_ahead.append(ahead.view(-1, *ahead.shape[-2:]))
        updates = _orthogonal(torch.cat(looked_ahead))
        size = _UPDATE_RMS * math.sqrt(max(updates.shape[-2:]))
        pieces = updates.split([len(piece) for piece in looked_ahead])
        for name, piece in zip(names, pieces, strict=True):
            master = self.state[f"master.{name}"]
            master.mul_(1 - rate * _WEIGHT_DECAY)
            master.add_(piece.view_as(master), alpha=-rate * size)

    @torch.no_grad()
    def _write_weights(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self.state[f"master.{name}"])


def _is_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() > 1 and "embed" not in name and "gate.weight" not in name


def _orthogonal(x_NAB: torch.Tensor) -> torch.Tensor:
    """Near to U V^T of each matrix's singular value decomposition: 5 Newton-Schulz steps.

    The coefficients are Jordan's: quick rather than exact, singular values end at 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x_NAB.shape[1] <= x_NAB.shape[2]
    x = (x_NAB if wide else x_NAB.transpose(1, 2)).to(torch.bfloat16)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.transpose(1, 2)).float()

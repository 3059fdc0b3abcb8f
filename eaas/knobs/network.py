"""The network that is trained: `LearnedKnobs` as torch parameters, at first ScalpeLB's static defaults."""

from __future__ import annotations

import numpy as np
import torch

from balancer.live.learned import BOUNDS, KNOBS, LearnedKnobs, static_knobs
from balancer.policies.types import Float

__all__ = ["Network"]

_HIDDEN = 8
# A sigmoid has no argument for its ends: defaults that are there begin so near to them.
_EDGE = 0.02


class Network(torch.nn.Module):
    """Features to knobs.

    Args:
        features_NF: Of the windows that are trained on, for their mean and scale.
        experts: Whose defaults are begun with.
        seed: Of the hidden weights.
    """

    def __init__(self, features_NF: Float, experts: int, seed: int) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)
        self.mean_F = torch.from_numpy(features_NF.mean(axis=0))
        # A feature that is the same in all windows says nothing, and would say too much of another one.
        scale_F = features_NF.std(axis=0)
        self.scale_F = torch.from_numpy(np.where(scale_F > 1e-6, scale_F, 1e6))
        count = features_NF.shape[1]
        hidden_NF = torch.randn(_HIDDEN, count, generator=dice, dtype=torch.float64)
        self.hidden_NF = torch.nn.Parameter(hidden_NF / count**0.5)
        self.hidden_N = torch.nn.Parameter(torch.zeros(_HIDDEN, dtype=torch.float64))
        self.out_KN = torch.nn.Parameter(torch.zeros(len(KNOBS), _HIDDEN, dtype=torch.float64))
        low_K, high_K = np.array([BOUNDS[name] for name in KNOBS]).T
        part_K = np.clip((static_knobs(experts) - low_K) / (high_K - low_K), _EDGE, 1 - _EDGE)
        self.out_K = torch.nn.Parameter(torch.from_numpy(np.log(part_K / (1 - part_K))))
        self._low_K, self._range_K = torch.from_numpy(low_K), torch.from_numpy(high_K - low_K)

    def forward(self, features_F: torch.Tensor) -> torch.Tensor:
        """float64 (K): knobs in the order of `KNOBS`, the budget not rounded."""
        x_F = (features_F - self.mean_F) / self.scale_F
        hidden_N = torch.tanh(self.hidden_NF @ x_F + self.hidden_N)
        part_K = torch.sigmoid(self.out_KN @ hidden_N + self.out_K)
        return self._low_K + self._range_K * part_K

    def frozen(self) -> LearnedKnobs:
        """The same in NumPy."""
        return LearnedKnobs(
            *(
                tensor.detach().numpy().copy()
                for tensor in (
                    *(self.mean_F, self.scale_F, self.hidden_NF),
                    *(self.hidden_N, self.out_KN, self.out_K),
                )
            )
        )

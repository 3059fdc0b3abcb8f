"""Gradients of one batch from several single-threaded processes.

On a machine that others use too, a process with two threads waits for its slower thread after every
operation; two processes with one thread each wait for one another once a batch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Gradients", "Workers"]

Gradients = Callable[[torch.Tensor], list[float]]
"""Add the gradients of a part of the batch to the weights' `grad`; returns figures to average."""


class Workers:
    """Processes that share the model's weights and compute the gradients of a part each.

    Make it before any other thread is started; weights move into shared memory. A batch has
    `most_ids` ids at most for each process.
    """

    def __init__(
        self, model: Any, count: int, compute: Gradients, most_ids: int, figures: int
    ) -> None:
        model.share_memory()
        self._compute = compute
        self._weights = dict(model.named_parameters())
        self._parts = [_Part(self._weights, most_ids, figures) for _ in range(count)]
        self._parts[0].lend_gradients()
        self._pipes = [self._fork(part) for part in self._parts[1:]]

    def gradients(self, parts: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Mean gradients (float32) and figures over all rows of the parts, one for each process."""
        for (go, _), part, ids in zip(self._pipes, self._parts[1:], parts[1:], strict=True):
            part.give(ids)
            os.write(go, b".")
        self._parts[0].run(self._compute, parts[0])
        for _, done in self._pipes:
            if not os.read(done, 1):
                raise RuntimeError("a training process died: see its error above")
        rows = sum(len(ids) for ids in parts)
        shares = [len(ids) / rows for ids in parts]
        total = {
            name: torch.zeros_like(w, dtype=torch.float32) for name, w in self._weights.items()
        }
        figures = torch.zeros_like(self._parts[0].figures)
        for part, share in zip(self._parts, shares, strict=True):
            for name, gradient in part.gradients.items():
                total[name].add_(gradient, alpha=share)
            figures.add_(part.figures, alpha=share)
        return total, figures.tolist()

    def _fork(self, part: _Part) -> tuple[int, int]:
        go_read, go_write = os.pipe()
        done_read, done_write = os.pipe()
        if os.fork():
            os.close(go_read)
            os.close(done_write)
            return go_write, done_read
        # Only the parent may hold the other ends, so that workers notice its end.
        os.close(go_write)
        os.close(done_read)
        try:
            part.lend_gradients()
            while os.read(go_read, 1):
                part.run(self._compute, part.given())
                os.write(done_write, b".")
        except BaseException:  # noqa: BLE001  # a forked process must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(0)


class _Part:
    """Shared memory for a worker's batch, gradients and figures."""

    def __init__(self, weights: dict[str, torch.Tensor], most_ids: int, figures: int) -> None:
        self._weights = weights
        self._ids = torch.zeros(most_ids, dtype=torch.int64).share_memory_()
        self._shape = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.figures = torch.zeros(figures, dtype=torch.float64).share_memory_()
        self.gradients = {
            name: torch.zeros(w.shape, dtype=w.dtype, device=w.device)
            for name, w in weights.items()
        }
        for gradient in self.gradients.values():
            gradient.share_memory_()

    def lend_gradients(self) -> None:
        """Let the worker's backward passes write here."""
        for name, weight in self._weights.items():
            weight.grad = self.gradients[name]

    def give(self, ids_BT: torch.Tensor) -> None:
        """Store a batch for the worker."""
        self._shape.copy_(torch.tensor(ids_BT.shape))
        self._ids[: ids_BT.numel()] = ids_BT.flatten()

    def given(self) -> torch.Tensor:
        """The stored batch."""
        rows, length = self._shape.tolist()
        return self._ids[: rows * length].view(rows, length)

    def run(self, compute: Gradients, ids: torch.Tensor) -> None:
        """Fill `gradients` and `figures`."""
        for gradient in self.gradients.values():
            gradient.zero_()
        self.figures.copy_(torch.tensor(compute(ids), dtype=torch.float64))

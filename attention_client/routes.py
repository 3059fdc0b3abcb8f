"""What the routers of a model choose, seen where its experts would be called.

The experts of every layer are ours (`model.py`), so the choice of each router passes by, whatever the
architecture. In a dry run it is all that is wanted, and no expert is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from eaas.types import ModelShape

__all__ = ["RouteTap", "RoutesSeenError", "SeenRoutes"]


class RoutesSeenError(Exception):
    """Ends a dry run: the router has chosen.

    Attributes:
        ids_TK: What.
    """

    def __init__(self, ids_TK: torch.Tensor) -> None:
        super().__init__("a dry run ends at the experts")
        self.ids_TK = ids_TK


class SeenRoutes:
    """The choices of the first layers in one forward pass, whole or in micro-batches.

    Args:
        layers: L, how many.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._parts: list[list[tuple[int, npt.NDArray[np.int64]]]] = [[] for _ in range(layers)]

    def note(self, layer: int, ids_TK: torch.Tensor, part: slice | None) -> None:
        """A router of `layer` has chosen for the tokens in `part` of the batch; None: for all."""
        if layer < self.layers:
            first = part.start if part is not None else 0
            self._parts[layer].append((first, ids_TK.detach().cpu().numpy()))

    def ids_LTK(self) -> npt.NDArray[np.int64] | None:
        """All of them, in the order of the batch; None where a layer saw fewer tokens than others."""
        layers = [
            np.concatenate([ids_TK for _, ids_TK in sorted(parts, key=lambda part: part[0])])
            for parts in self._parts
            if parts
        ]
        if len(layers) != self.layers or len({ids_TK.shape for ids_TK in layers}) != 1:
            return None
        return np.stack(layers)


class RouteTap:
    """Where the routes of one model pass by. Used by the thread that runs the model.

    Args:
        shape: The model's.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._dry = False
        self._seen: SeenRoutes | None = None

    def see(self, layer: int, ids_TK: torch.Tensor, part: slice | None) -> None:
        """A router has chosen. Raises RoutesSeenError in a dry run."""
        if self._dry:
            raise RoutesSeenError(ids_TK)
        if self._seen is not None:
            self._seen.note(layer, ids_TK, part)

    @contextlib.contextmanager
    def watching(self, layers: int) -> Iterator[SeenRoutes]:
        """While in the block, choices of the first layers are written down."""
        self._seen = seen = SeenRoutes(layers)
        try:
            yield seen
        finally:
            self._seen = None

    @contextlib.contextmanager
    def dry(self) -> Iterator[None]:
        """While in the block, no expert is called."""
        self._dry = True
        try:
            yield
        finally:
            self._dry = False

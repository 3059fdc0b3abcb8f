"""Intercept a model's router choices where its experts are called, for the client's scheduler.

Every layer's experts class is replaced (`model.py`), so each router's choice passes here, whatever the
architecture. A dry run ends at this point, before any expert computes.
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
    """Raised at a layer's experts to end a dry run once the router has chosen.

    Attributes:
        ids_TK: The chosen experts.
    """

    def __init__(self, ids_TK: torch.Tensor) -> None:
        super().__init__("a dry run ends at the experts")
        self.ids_TK = ids_TK


class SeenRoutes:
    """Record of the first layers' router choices in one forward pass, whole or in micro-batches.

    Args:
        layers: Number of layers (L).
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._parts: list[list[tuple[int, npt.NDArray[np.int64]]]] = [[] for _ in range(layers)]

    def note(self, layer: int, ids_TK: torch.Tensor, part: slice | None) -> None:
        """Add a router's choice for the tokens in `part` of the batch; None: all. Ignores later layers."""
        if layer < self.layers:
            first = part.start if part is not None else 0
            # A copy: a compiled pass reuses the tensor's memory.
            self._parts[layer].append((first, ids_TK.detach().cpu().numpy().copy()))

    def ids_LTK(self) -> npt.NDArray[np.int64] | None:
        """Return the pass's choices in batch order, for the scheduler; None if layers differ in tokens."""
        layers = [
            np.concatenate([ids_TK for _, ids_TK in sorted(parts, key=lambda part: part[0])])
            for parts in self._parts
            if parts
        ]
        if len(layers) != self.layers or len({ids_TK.shape for ids_TK in layers}) != 1:
            return None
        return np.stack(layers)


class RouteTap:
    """Receives every router choice of one model. Used by the thread that runs the model.

    Args:
        shape: The model's shape.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._dry = False
        self._seen: SeenRoutes | None = None

    def see(self, layer: int, ids_TK: torch.Tensor, part: slice | None) -> None:
        """Receive a router's choice, just before its experts run; record it if watched, end a dry run."""
        if self._dry:
            raise RoutesSeenError(ids_TK)
        if self._seen is not None:
            self._seen.note(layer, ids_TK, part)

    @contextlib.contextmanager
    def watching(self, layers: int) -> Iterator[SeenRoutes]:
        """Record the first layers' router choices in forward passes inside the block, for the scheduler."""
        self._seen = seen = SeenRoutes(layers)
        try:
            yield seen
        finally:
            self._seen = None

    @contextlib.contextmanager
    def dry(self) -> Iterator[None]:
        """Make each layer raise RoutesSeenError after its router inside the block; no routed expert runs."""
        self._dry = True
        try:
            yield
        finally:
            self._dry = False

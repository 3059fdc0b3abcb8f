"""Random values for the tensors of a layout, drawn in pieces of a few megabytes.

Uniform random bits are indices into a table of values or codes. That is as fast as a disk, and works for
formats that numpy does not know. A tensor depends only on the seed and its own name.

Two things keep greedy text readable and varied:

- The first dimension of the embedding is a constant, and the layers add little to it. The output layer uses
  it to give a low score to every token that is not a word of the tokenizer.
- A random cycle gives each word a successor. The successor's output row leans toward the word's embedding.
  So a word hardly ever follows itself, but the layers still decide many of the tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from eaas_cli.demo_model.layout import Draw, TensorPlan

__all__ = ["draw_tensor"]

_PIECE_BYTES = 8 << 20
_TABLE = 1 << 16
_TAKEN_AT_ONCE = 1 << 16  # indices that fit a core's cache, which numpy widens to 64 bits

_E4M3_SIZE = (
    112.0  # a quarter of e4m3's maximum, as if a block's largest weight were four times their size
)
_E2M1_SIZE = math.sqrt(8.5625)  # of random codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
_INT4_SIZE = math.sqrt(21.5)  # of random codes: -8 to 7
_SCALE_SPREAD = 0.25
_OTHER_TOKENS = 0.25  # size of their output rows
_OTHER_TOKENS_LOGIT = -48.0  # before the final norm
_SUCCESSOR_LOGIT = 12.0  # before the final norm

Array = np.ndarray[Any, np.dtype[Any]]


def draw_tensor(plan: TensorPlan, seed: int, words: Collection[int]) -> Iterator[Array]:
    """Yield the tensor's values as they stand in a file, in pieces of contiguous arrays.

    Args:
        words: Ids of the tokens, at least one, that a `Draw.OUTPUT` layer shall choose.
    """
    match plan.draw:
        case Draw.SHAPE:
            yield np.array(plan.values, dtype=np.int64)
        case Draw.ONES:
            yield _as_stored(np.ones(plan.shape, dtype=np.float32), plan.dtype)
        case Draw.EMBEDDING:
            yield from _embedding(plan, seed)
        case Draw.OUTPUT:
            yield from _output(plan, seed, words)
        case _:
            table = _table(plan.draw, plan.dtype, plan.size)
            values = plan.nbytes // table.itemsize
            random = _Bits(plan.name, seed)
            piece = _PIECE_BYTES // table.itemsize
            for first in range(0, values, piece):
                yield random.take(table, min(piece, values - first))


class _Bits:
    """The random bits of a tensor."""

    def __init__(self, name: str, seed: int) -> None:
        digest = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
        self._bits = np.random.SFC64(np.random.SeedSequence([seed, *digest.tolist()]))

    def integers(self, count: int, dtype: type[np.unsignedinteger[Any]]) -> Array:
        """Draw uniform integers of all bits."""
        words = -(-count * np.dtype(dtype).itemsize // 8)
        return self._bits.random_raw(words).view(dtype)[:count]

    def take(self, table: Array, count: int) -> Array:
        """Draw uniform entries of a table with 2^8 bytes, or with 2^16 values."""
        if len(table) == 256:
            codes = self.integers(count, np.uint8)
            return np.frombuffer(codes.tobytes().translate(table.tobytes()), dtype=table.dtype)
        return _take(table, self.integers(count, np.uint16))


def _take(table: Array, indices: Array) -> Array:
    values = np.empty(indices.shape, dtype=table.dtype)
    flat, out = indices.reshape(-1), values.reshape(-1)
    for first in range(0, len(flat), _TAKEN_AT_ONCE):
        part = slice(first, first + _TAKEN_AT_ONCE)
        np.take(table, flat[part], out=out[part], mode="clip")
    return values


def _embedding(plan: TensorPlan, seed: int) -> Iterator[Array]:
    """Yield an embedding (V, H) in pieces of whole rows."""
    table = _table(Draw.NORMAL, plan.dtype, plan.size)
    for _, indices in _rows(plan, seed):
        values = _take(table, indices)
        values[:, 0] = _as_stored(np.float32(_constant(plan)), plan.dtype)
        yield values


def _output(plan: TensorPlan, seed: int, words: Collection[int]) -> Iterator[Array]:
    """Yield an output layer (V, H) in pieces of whole rows."""
    hidden = plan.shape[1]
    others = _table(Draw.NORMAL, plan.dtype, plan.size * _OTHER_TOKENS)
    normal = plan.size * _normal(_TABLE)
    ids = np.array(sorted(words))
    toward = _SUCCESSOR_LOGIT / hidden * _predecessors(plan, seed, ids)
    for first, indices in _rows(plan, seed):
        values = _take(others, indices)
        logit = np.float32(_OTHER_TOKENS_LOGIT / _constant(plan))
        values[:, 0] = _as_stored(logit, plan.dtype)
        here = (first <= ids) & (ids < first + len(indices))
        rows = normal[indices[ids[here] - first]] + toward[here]
        rows[:, 0] = 0
        values[ids[here] - first] = _as_stored(rows, plan.dtype)
        yield values


def _rows(plan: TensorPlan, seed: int) -> Iterator[tuple[int, Array]]:
    """Yield pieces of whole rows: number of the first row, random indices."""
    vocab, hidden = plan.shape
    random = _Bits(plan.name, seed)
    rows = max(1, _PIECE_BYTES // (plan.item_bytes * hidden))
    for first in range(0, vocab, rows):
        count = min(rows, vocab - first)
        yield first, random.integers(count * hidden, np.uint16).reshape(count, hidden)


def _predecessors(plan: TensorPlan, seed: int, ids: Array) -> Array:
    """Return the embedding of each word's predecessor in a random cycle: float32, (words, H)."""
    embedding = replace(plan, name=plan.embedding, draw=Draw.EMBEDDING, size=1.0)
    normal = _normal(_TABLE)
    rows = np.empty((len(ids), plan.shape[1]), dtype=np.float32)
    for first, indices in _rows(embedding, seed):
        here = (first <= ids) & (ids < first + len(indices))
        rows[here] = normal[indices[ids[here] - first]]
        if first + len(indices) > ids[-1]:
            break
    cycle = np.random.default_rng(seed).permutation(len(ids))
    before = np.empty_like(cycle)
    before[cycle] = np.roll(cycle, 1)
    return rows[before]


def _constant(plan: TensorPlan) -> float:
    """Return the first dimension of the embedding, which is a fifth of a state's square."""
    return math.sqrt(plan.shape[1]) / 2


@cache
def _table(draw: Draw, dtype: str, size: float) -> Array:
    """Return the table whose uniformly drawn entries are the values of a tensor."""
    match draw:
        case Draw.NORMAL:
            return _as_stored(size * _normal(_TABLE), dtype)
        case Draw.E4M3:
            return _e4m3_codes()
        case Draw.E4M3_SCALE:
            values = torch.from_numpy(_e4m3_codes().copy()).view(torch.float8_e4m3fn).double()
            return _scales(size / float(values.square().mean().sqrt()), dtype)
        case Draw.INT4_SCALE:
            return _scales(size / _INT4_SIZE, dtype)
        case Draw.E8M0_SCALE:
            # Two neighbouring powers of two, as often as their mean square demands.
            lower = math.floor(math.log2(size / _E2M1_SIZE))
            share = (4 ** (math.log2(size / _E2M1_SIZE) - lower) - 1) / 3
            uppers = np.arange(256) >= 256 * (1 - share)
            return (127 + lower + uppers).astype(np.uint8)
        case _:  # E2M1, INT4
            return np.arange(256, dtype=np.uint8)


@cache
def _normal(count: int) -> Array:
    """Return quantiles of the normal distribution: float32, root mean square 1."""
    distribution = NormalDist()
    values: Array = np.array([distribution.inv_cdf((i + 0.5) / count) for i in range(count)])
    values /= np.sqrt(np.mean(values**2))
    return values.astype(np.float32)


def _e4m3_codes() -> Array:
    codes = torch.from_numpy(_E4M3_SIZE * _normal(256)).to(torch.float8_e4m3fn)
    bits: Array = codes.view(torch.uint8).numpy()
    return bits


def _scales(size: float, dtype: str) -> Array:
    """Return scales within a quarter of their mean, with this root mean square."""
    values = np.linspace(1 - _SCALE_SPREAD, 1 + _SCALE_SPREAD, _TABLE)
    return _as_stored((size * values / np.sqrt(np.mean(values**2))).astype(np.float32), dtype)


def _as_stored(values: Array | np.float32, dtype: str) -> Array:
    """Convert float32 to the bits of F32 or BF16."""
    if dtype == "F32":
        return np.asarray(values)
    bits: Array = torch.as_tensor(values).bfloat16().view(torch.int16).numpy()
    return bits.view(np.uint16)

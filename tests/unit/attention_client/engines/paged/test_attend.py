"""Attention over the paged cache, against torch's attention of each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.engines.transformers.paged._paged import attend, pool
from emulated_amx import build, missing

PAGE = 4


@dataclass
class Batch:
    """Sequences of one layer: all their keys and values, and how many of them are new."""

    q: torch.Tensor  # (1, heads, T, D)
    keys: list[torch.Tensor]  # of each sequence: (kv_heads, tokens, D)
    values: list[torch.Tensor]  # (kv_heads, tokens, V)
    new: list[int]
    window: int
    is_latent: bool = False  # kv_heads share their keys, whose first values are the values

    @classmethod
    def random(
        cls,
        lengths: list[tuple[int, int]],
        heads: int,
        group: int,
        size: int,
        window: int,
        dtype: torch.dtype,
        v_size: int | None = None,
        is_latent: bool = False,
    ) -> Batch:
        """Make sequences of (past, new) tokens; values are as wide as keys, unless v_size is given."""
        generator = torch.Generator().manual_seed(len(lengths) * 1000 + size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        kv_heads = heads // group
        new = [count for _, count in lengths]
        keys = [normal(1 if is_latent else kv_heads, past + n, size) for past, n in lengths]
        if is_latent:
            keys = [one.expand(kv_heads, -1, -1) for one in keys]
            values = [one[..., :v_size] for one in keys]
        else:
            values = [normal(kv_heads, past + n, v_size or size) for past, n in lengths]
        return cls(normal(1, heads, sum(new), size), keys, values, new, window, is_latent)

    def expected(self, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """(1, T, heads, V) in float64."""
        parts, first = [], 0
        for keys, values, new in zip(self.keys, self.values, self.new, strict=True):
            q = self.q[0, :, first : first + new].double()
            first += new
            group = q.shape[0] // keys.shape[0]
            k, v = (x.double().repeat_interleave(group, 0) for x in (keys, values))
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            tokens = keys.shape[1]
            at, seen = torch.arange(tokens - new, tokens)[:, None], torch.arange(tokens)[None]
            hidden = seen > at
            if self.window:
                hidden |= seen <= at - self.window
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = scores.softmax(-1)[..., :tokens]
            parts.append((weights @ v).transpose(0, 1))
        return torch.cat(parts)[None]

    def run(self, **options: Any) -> tuple[torch.Tensor, Cache]:
        cache = Cache(self)
        _, heads, tokens, _ = self.q.shape
        out = torch.full(
            (1, tokens, heads, self.values[0].shape[-1]), torch.nan, dtype=self.q.dtype
        )
        k, v = cache.new_of(self.keys), cache.new_of(self.values)
        cache.attend(self.q, k, v, out, **options)
        return out, cache


class Cache:
    """A cache with the sequences' past tokens, in blocks that are shuffled."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        kv_heads, _, size = batch.keys[0].shape
        v_size = batch.values[0].shape[-1]
        longest = max(keys.shape[1] for keys in batch.keys)
        in_cache = min(longest, batch.window) if batch.window else longest
        self.blocks = -(-in_cache // PAGE)
        count = len(batch.keys)
        order = torch.randperm(count * self.blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order.to(torch.int32).reshape(count, self.blocks)
        # A block has the pages of two layers, each with keys and values; this is the second one.
        self.block_rows = 4 * PAGE
        rows = count * self.blocks * self.block_rows
        # What no sequence has written must not matter.
        widths = (rows, 1 if batch.is_latent else kv_heads, max(size, v_size))
        flat = torch.full(widths, torch.nan, dtype=batch.q.dtype)
        k = flat[2 * PAGE :, :, :size]
        v = flat[(2 if batch.is_latent else 3) * PAGE :, :, :v_size]
        for s, new in enumerate(batch.new):
            rows, place = self.rows(s, new)
            k[rows] = batch.keys[s][: k.shape[1], place].transpose(0, 1).to(k.dtype)
            v[rows] = batch.values[s][: v.shape[1], place].transpose(0, 1).to(v.dtype)
        self.k, self.v = k.expand(-1, kv_heads, -1), v.expand(-1, kv_heads, -1)

    def rows(self, sequence: int, without: int = 0) -> tuple[torch.Tensor, slice]:
        """The rows of a sequence's tokens, and which tokens: those in the window, without the last ones."""
        window, end = self.batch.window, self.batch.keys[sequence].shape[1] - without
        first = max(0, end - window) if window else 0
        slots = torch.arange(first, end) % window if window else torch.arange(first, end)
        blocks = self.tables[sequence, slots // PAGE].long()
        return blocks * self.block_rows + slots % PAGE, slice(first, end)

    def new_of(self, all_tokens: list[torch.Tensor]) -> torch.Tensor:
        """(1, kv_heads, T, D), a transposed view as a model makes it."""
        new = [
            tokens[:, tokens.shape[1] - n :]
            for tokens, n in zip(all_tokens, self.batch.new, strict=True)
        ]
        if self.batch.is_latent:
            one = torch.cat(new, dim=1)[:1].contiguous()
            return one.expand(len(new[0]), -1, -1)[None]
        return torch.cat(new, dim=1).transpose(0, 1).contiguous().transpose(0, 1)[None]

    def attend(self, q: Any, k: Any, v: Any, out: Any, **options: Any) -> None:
        new = torch.tensor([0, *self.batch.new])
        past = [keys.shape[1] - n for keys, n in zip(self.batch.keys, self.batch.new, strict=True)]
        run = options.pop("attend", attend)
        arguments = {
            "tables": self.tables,
            "begins": new.cumsum(0).to(torch.int32),
            "past": torch.tensor(past, dtype=torch.int32),
            "block_rows": self.block_rows,
            "page": PAGE,
            "window": self.batch.window,
            "scale": q.shape[-1] ** -0.5,
            "softcap": 0.0,
            "sinks": None,
            "pool": None,
        } | options
        run(q, k, v, out, self.k, self.v, *arguments.values())


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-5 if out.dtype is torch.float32 else 2e-2
    return torch.allclose(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(data=st.data())
def test_each_sequence_has_its_own_attention(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=3),
        "(past, new)",
    )
    # 40 heads of one kind suffice: the expected values, in float64, take longest.
    group, kv_heads = data.draw(
        st.tuples(st.sampled_from([1, 2, 4, 7]), st.integers(1, 3)) | st.just((40, 1)), "heads"
    )
    heads = group * kv_heads
    sizes = st.sampled_from([1, 8, 16, 24, 64, 80, 128, 192, 256])
    size, v_size = data.draw(sizes, "size"), data.draw(st.none() | sizes, "v_size")
    window = data.draw(st.sampled_from([0, 0, 1, 5, 32, 60, 200]), "window")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    softcap = data.draw(st.sampled_from([0.0, 0.0, 1.5]), "softcap")
    sinks = torch.randn(heads) if data.draw(st.booleans(), "sinks") else None
    batch = Batch.random(lengths, heads, group, size, window, dtype, v_size)
    out, cache = batch.run(softcap=softcap, sinks=sinks)
    assert close(out, batch.expected(softcap, sinks))
    assert_written(batch, cache)


def assert_written(batch: Batch, cache: Cache) -> None:
    for s, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows, place = cache.rows(s)
        assert torch.equal(cache.k[rows], keys[:, place].transpose(0, 1))
        assert torch.equal(cache.v[rows], values[:, place].transpose(0, 1))


@settings(max_examples=30)
@given(data=st.data())
def test_heads_share_their_keys_and_values(data: st.DataObject) -> None:
    """Latent attention: a token has one row, whose first values are the values."""
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=3),
        "(past, new)",
    )
    group = data.draw(st.sampled_from([1, 3, 4, 16, 32]), "group")
    heads = group * data.draw(st.integers(1, 4), "kv_heads")
    size = data.draw(st.sampled_from([2, 24, 80, 320, 576]), "size")
    v_size = data.draw(st.sampled_from([1, 16, 72, 256, 512]).filter(lambda v: v <= size), "v_size")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    batch = Batch.random(lengths, heads, group, size, 0, dtype, v_size, is_latent=True)
    out, cache = batch.run()
    assert close(out, batch.expected())
    assert_written(batch, cache)


@pytest.mark.parametrize(
    ("lengths", "window", "v_size", "dtype"),
    [
        ([(500, 100), (300, 1), (10, 200), (0, 1), (400, 64)], 32, None, torch.float32),
        ([(300, 60), (300, 1), (10, 120), (0, 1), (200, 64)], 0, 128, torch.bfloat16),
        ([(1000, 1)], 0, None, torch.bfloat16),
    ],
)
def test_threads_change_no_bit(
    lengths: list[tuple[int, int]], window: int, v_size: int | None, dtype: torch.dtype
) -> None:
    batch = Batch.random(lengths, 8, 2, 64, window, dtype, v_size)
    alone, _ = batch.run()
    for threads in (1, 2, 3):
        shared_by = pool(threads)
        # The first call is alone, the second is shared, and then the sooner one.
        for _ in range(4):
            out, _ = batch.run(pool=shared_by)
            assert torch.equal(out, alone)


@pytest.mark.parametrize(("window", "size"), [(0, 80), (50, 64), (300, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_parts_nor_neighbours_change_a_bit(
    window: int, size: int, dtype: torch.dtype
) -> None:
    whole = Batch.random([(0, 401)], 6, 3, size, window, dtype)
    out, _ = whole.run()
    for first, count in ((0, 97), (97, 2), (130, 271)):
        end = first + count
        part = Batch.random([(7, 60), (first, count), (90, 1)], 6, 3, size, window, dtype)
        part.q[:, :, 60 : 60 + count] = whole.q[:, :, first:end]
        part.keys[1], part.values[1] = whole.keys[0][:, :end], whole.values[0][:, :end]
        assert torch.equal(part.run()[0][:, 60 : 60 + count], out[:, first:end])


# Small and large tasks, blocks of keys that are cut by windows, rows that fill no tile or only one.
LONG = [
    Batch.random([(300, 150)], 4, 1, 64, 0, torch.bfloat16),
    Batch.random([(0, 290), (131, 70)], 8, 4, 80, 0, torch.bfloat16, 48),
    Batch.random([(40, 200)], 8, 8, 96, 50, torch.bfloat16),
    Batch.random([(250, 140)], 6, 3, 128, 129, torch.bfloat16, 16),
    Batch.random([(127, 2), (128, 1), (500, 4)], 16, 16, 16, 0, torch.bfloat16, 112),
    Batch.random([(20, 5)], 260, 130, 48, 0, torch.bfloat16),
    Batch.random([(20, 3)], 300, 300, 32, 0, torch.bfloat16),
    Batch.random([(90, 60), (200, 1)], 32, 16, 576, 0, torch.bfloat16, 512, is_latent=True),
]


@pytest.mark.parametrize("batch", LONG, ids=range(len(LONG)))
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (1.5, True)])
def test_long_prompts(batch: Batch, softcap: float, has_sinks: bool) -> None:
    sinks = torch.randn(batch.q.shape[1]) if has_sinks else None
    for threads in (1, 2):
        out, _ = batch.run(softcap=softcap, sinks=sinks, pool=pool(threads))
        assert close(out, batch.expected(softcap, sinks))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension with emulated tiles, whose checks end the process."""
    if missing("avx512_bf16"):
        pytest.skip(f"the emulation needs {missing('avx512_bf16')}")
    folder = tmp_path_factory.mktemp("emulated")
    return build(folder, "attention_client/engines/transformers/paged", "_paged")


# Ten seconds of compilation, alone.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", LONG, ids=range(len(LONG)))
def test_emulated_tiles(emulated: ModuleType, batch: Batch) -> None:
    sinks = torch.randn(batch.q.shape[1])
    for softcap in (0.0, 1.5):
        out, _ = batch.run(attend=emulated.attend, softcap=softcap, sinks=sinks)
        assert close(out, batch.expected(softcap, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_are_large_or_grow_along_the_keys(dtype: torch.dtype) -> None:
    """None overflows; what was summed before is scaled at nearly every block of keys."""
    large = Batch.random([(40, 3)], 4, 2, 64, 0, dtype)
    large.q *= 1000
    growing = Batch.random([(300, 240)], 4, 2, 64, 0, dtype)
    growing.keys[0] *= torch.linspace(0, 20, 540)[:, None].to(dtype)
    for batch in (large, growing):
        assert close(batch.run()[0], batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_sequence(dtype: torch.dtype) -> None:
    batch = Batch.random([(3, 2), (5, 1), (140, 9)], 4, 2, 64, 0, dtype)
    for poisoned in (batch.keys, batch.values):
        poisoned[0][:, 1] = torch.nan
    out, _ = batch.run()
    assert out[0, :2].isnan().all()
    assert close(out[:, 2:], batch.expected()[:, 2:])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tables": torch.zeros(2, 9, dtype=torch.int64)}, "int32"),
        ({"tables": torch.full((2, 9), 10_000, dtype=torch.int32)}, "beyond"),
        ({"tables": torch.full((2, 9), -1, dtype=torch.int32)}, "beyond"),
        ({"begins": torch.tensor([0, 2, 99], dtype=torch.int32)}, "beyond"),
        ({"begins": torch.tensor([0, 3, 2], dtype=torch.int32)}, "beyond"),
        ({"past": torch.tensor([3, 5_000], dtype=torch.int32)}, "beyond"),
        ({"past": torch.tensor([3, -1], dtype=torch.int32)}, "beyond"),
        ({"page": 0}, "range"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], word: str) -> None:
    batch = Batch.random([(3, 2), (5, 1)], 4, 2, 16, 0, torch.float32)
    with pytest.raises(ValueError, match=word):
        batch.run(**changes)


def test_other_dtypes_and_no_threads_are_refused() -> None:
    batch = Batch.random([(3, 2)], 4, 2, 16, 0, torch.float32)
    batch.q = batch.q.bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        batch.run()
    with pytest.raises(ValueError, match="0 threads"):
        pool(0)

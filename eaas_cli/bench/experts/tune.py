"""Measures kernel `triton`'s tiles on a GPU, and keeps the fastest for its servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from eaas.errors import ConfigError
from eaas.log import one_line
from eaas_cli.bench.command import figure
from eaas_cli.bench.experts.places import Cpu
from eaas_cli.bench.experts.plan import Plan, Shape
from eaas_cli.bench.experts.source import Batches, Source, load_experts, spec_of
from expert_server.kernels.kernel import UnsupportedError

if TYPE_CHECKING:
    from expert_server.kernels.gpu.tiles import Tile

    # Bucket -> tile -> logarithms of its times.
    Logs = dict[str, dict[Tile, list[float]]]

__all__ = ["CALLS", "refuse_weights", "tune"]

CALLS = 7
"""Calls of a tile with each batch size. Each has other experts, so that caches hold few of the weights."""


def refuse_weights(option: str, plan: Plan) -> None:
    """Raise ConfigError if a GPU's kernel has no weights of a dtype of the plan. `option` asked for it."""
    from expert_server.kernels.gpu.packing import check_spec

    for dtype in plan.dtypes:
        try:
            check_spec(spec_of(dtype, plan.threads))
        except UnsupportedError as error:
            raise ConfigError(f"{option} --dtype {dtype}: {error}") from None


def tune(plan: Plan, place: Cpu, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure the tiles of the plan's dtypes; keep the fastest of each bucket in the user's cache.

    The fastest has the least geometric mean of the times of all shapes and batch sizes of its bucket. A tile
    that fails with one of them, as where it takes more than the device has, is skipped with a line. Times
    include the launches from Python, although servers replay graphs of batches of up to 256 tokens.

    Args:
        plan: Shapes, batch sizes and dtypes of the stored weights, which the kernel has (`refuse_weights`).
        place: A GPU.
        say: Takes lines of progress.

    Returns:
        The document's entries: dtype, bucket, tile, and its time as a share of that of the tile in the code,
        which is 0 if that one was skipped.
    """
    from expert_server.kernels.gpu.packing import check_spec
    from expert_server.kernels.gpu.tiles import TILES, keep_tiles

    entries = []
    for dtype in plan.dtypes:
        coding = check_spec(spec_of(dtype, plan.threads))
        logs: Logs = {"few": {}, "many": {}}
        device = ""
        for shape in plan.shapes:
            device = _measure(shape, dtype, plan, place, logs, say)
        best: dict[str, Tile] = {}
        for bucket, of in logs.items():
            if not any(math.isfinite(sum(each)) for each in of.values()):
                continue  # No batch size of the plan is for it, or no tile fits.
            tile = best[bucket] = min(of, key=lambda one, of=of: sum(of[one]))  # type: ignore[misc]
            before = of[TILES[coding][bucket]]
            share = math.exp((sum(of[tile]) - sum(before)) / len(before))
            entry = {"dtype": dtype, "bucket": bucket, "tile": tile._asdict()}
            entries.append(entry | {"share": figure(share)})
        if best:
            say(f"{dtype}: tiles are kept in {keep_tiles(device, coding, best)}")
    return entries


def _measure(
    shape: Shape,
    dtype: str,
    plan: Plan,
    place: Cpu,
    logs: Logs,
    say: Callable[[str], None],
) -> str:
    """Add the logarithms of the tiles' times in one layer, inf if it failed; return the device's name."""
    from expert_server.kernels.gpu.kernel import TritonKernel
    from expert_server.kernels.gpu.packing import check_spec
    from expert_server.kernels.gpu.tiles import bucket_of, candidates

    spec = spec_of(dtype, plan.threads)
    source = Source(shape, spec.dtype)
    kernel = place.kernels["triton"]([source.form], spec)
    assert isinstance(kernel, TritonKernel)

    def seconds(tokens: int) -> float:
        calls = [partial(place.compute, kernel, batch) for batch in some[tokens]]
        for call in calls[: place.warm_ups]:
            call()
        return median(place.timed(call)[0] for call in calls)

    try:
        say(f"{shape} {dtype}: loads the experts")
        load_experts(kernel, source, dtype)
        batches = Batches(shape, spec.dtype, max(plan.tokens))
        before = kernel.tiles
        for bucket, tiles in candidates(check_spec(spec)).items():
            some = {
                tokens: [batches.get(tokens, seed).to(place.at) for seed in range(CALLS)]
                for tokens in plan.tokens
                if bucket_of(tokens * shape.top_k, shape.num_experts) == bucket
            }
            say(f"{shape} {dtype}: {len(tiles)} tiles for {bucket} rows, T = {list(some)}")
            for tile in tiles if some else ():
                kernel.tiles = {**before, bucket: tile}
                took = logs[bucket].setdefault(tile, [])
                try:
                    took += [math.log(seconds(tokens)) for tokens in some]
                except RuntimeError as error:
                    took.append(math.inf)
                    why = one_line(error)
                    say(f"{shape} {dtype}: skips {tile} for {bucket} rows: {why}")
    finally:
        kernel.close()
    return kernel.isa

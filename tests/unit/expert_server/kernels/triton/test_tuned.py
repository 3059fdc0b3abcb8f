"""Tiles: measured ones in the user's cache, and rows grouped by expert and divided into tiles."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_server.kernels.gpu.tiles import (
    TILES,
    Coding,
    bucket_of,
    candidates,
    keep_tiles,
    tiles_of,
    tuned_path,
)
from interpreted_triton import interpreted_kernel, needs_triton

DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_without_a_file_the_codes_tiles_are_used(caplog: pytest.LogCaptureFixture) -> None:
    for coding in Coding:
        assert tiles_of(DEVICE, coding) is TILES[coding]
    assert not caplog.records


def test_measured_tiles_are_those_of_their_device_and_weights(cache: Path) -> None:
    few = candidates(Coding.FP8)["few"][-1]
    many = candidates(Coding.MXFP4)["many"][-1]
    path = keep_tiles(DEVICE, Coding.FP8, {"few": few})
    assert path == cache / "eaas/tiles/NVIDIA-H100-80GB-HBM3.json" == tuned_path(DEVICE)
    keep_tiles(DEVICE, Coding.MXFP4, {"many": many})
    assert tiles_of(DEVICE, Coding.FP8) == TILES[Coding.FP8] | {"few": few}
    assert tiles_of(DEVICE, Coding.MXFP4) == TILES[Coding.MXFP4] | {"many": many}
    other = candidates(Coding.FP8)["many"][-1]
    keep_tiles(DEVICE, Coding.FP8, {"many": other})
    keep_tiles(DEVICE, Coding.BFLOAT16, {})
    assert tiles_of(DEVICE, Coding.FP8) == {"few": few, "many": other}
    assert tiles_of(DEVICE, Coding.BFLOAT16) == TILES[Coding.BFLOAT16]
    assert tiles_of("NVIDIA A100", Coding.FP8) is TILES[Coding.FP8]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_a_home_directory_the_codes_tiles_are_used(monkeypatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    assert tiles_of(DEVICE, Coding.FP8) is TILES[Coding.FP8]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"FP8": [1]}',
        '{"FP8": {"few": [16, 64, 4]}}',
        '{"FP8": {"few": [128, 128, 8, 3]}}',
        '{"FP8": {"some": [16, 64, 4, 4]}}',
        '{"FP8": {"step": 64}}',
    ],
)
def test_an_unusable_file_is_named_and_replaced(content, caplog) -> None:
    path = tuned_path(DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert tiles_of(DEVICE, Coding.FP8) is TILES[Coding.FP8]
    assert f"{path}: tiles are not used" in caplog.text
    tile = candidates(Coding.FP8)["few"][1]
    keep_tiles(DEVICE, Coding.FP8, {"few": tile})
    assert tiles_of(DEVICE, Coding.FP8)["few"] == tile


@given(st.sampled_from(Coding), st.data())
def test_all_tiles_of_a_coding_add_up_in_one_order(coding: Coding, data: st.DataObject) -> None:
    """The inputs of a step are no part of what is measured or kept."""
    allowed = candidates(coding)
    measured = {bucket: data.draw(st.sampled_from(tiles)) for bucket, tiles in allowed.items()}
    path = keep_tiles(DEVICE, coding, measured)
    assert tiles_of(DEVICE, coding) == measured
    assert json.loads(path.read_text())[coding.name].keys() == measured.keys()
    assert {bucket: tiles[0] for bucket, tiles in allowed.items()} == TILES[coding]


def test_the_bucket_of_a_batch() -> None:
    for rows in (1, 255, 256, 5000):
        assert bucket_of(rows, 8) == ("many" if rows >= 256 else "few")


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    interpreted_kernel()
    from expert_server.kernels.gpu import launches

    return launches


@needs_triton
@given(
    ids=st.lists(st.integers(-1, 6), max_size=200),
    tile_rows=st.sampled_from([1, 4, 16, 64]),
    extra=st.integers(0, 3),
)
def test_every_row_is_in_one_tile_of_its_expert(launches, ids, tile_rows, extra) -> None:
    ids_TK = torch.tensor(ids, dtype=torch.int32).view(-1, 1)
    groups = launches.group_rows(ids_TK, 7 + extra, tile_rows)
    order = groups.order.tolist()
    assert sorted(order) == list(range(len(ids)))
    found = []
    for expert, start, end in zip(
        groups.expert_M.tolist(), groups.start_M.tolist(), groups.end_M.tolist(), strict=True
    ):
        assert 0 <= expert < 7 + extra
        found += [(order[row], expert) for row in range(start, min(end, start + tile_rows))]
    # In the order of the experts, and of the tokens among one expert's.
    assert found == sorted(
        ((pair, expert) for pair, expert in enumerate(ids) if expert >= 0),
        key=lambda each: (each[1], each[0]),
    )


@needs_triton
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    tile_rows=st.sampled_from([1, 16, 64]),
)
def test_the_grid_is_large_enough(launches, counts: list[int], tile_rows: int) -> None:
    needed = sum(-(-count // tile_rows) for count in counts)
    assert needed <= launches.most_tiles(sum(counts), len(counts), tile_rows)


@needs_triton
def test_the_grid_of_a_small_batch_has_a_tile_for_each_row(launches: ModuleType) -> None:
    assert launches.most_tiles(8, 128, 16) == 8
    assert launches.most_tiles(0, 128, 16) == 0

"""Tiles that were measured on a device, in the user's cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_server.kernels.gpu.tiles import TILES, Coding, Tile, candidates, is_many
from expert_server.kernels.gpu.tuned import keep_tiles, tiles_of, tuned_path

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
    path = keep_tiles(DEVICE, {Coding.FP8: {"few": few}})
    assert path == cache / "eaas/tiles/NVIDIA-H100-80GB-HBM3.json" == tuned_path(DEVICE)
    keep_tiles(DEVICE, {Coding.MXFP4: {"many": many}})
    assert tiles_of(DEVICE, Coding.FP8) == dataclasses.replace(TILES[Coding.FP8], few=few)
    assert tiles_of(DEVICE, Coding.MXFP4) == dataclasses.replace(TILES[Coding.MXFP4], many=many)
    other = candidates(Coding.FP8)["many"][-1]
    keep_tiles(DEVICE, {Coding.FP8: {"many": other}, Coding.BFLOAT16: {}})
    assert tiles_of(DEVICE, Coding.FP8) == dataclasses.replace(
        TILES[Coding.FP8], few=few, many=other
    )
    assert tiles_of(DEVICE, Coding.BFLOAT16) == TILES[Coding.BFLOAT16]
    assert tiles_of("NVIDIA A100", Coding.FP8) is TILES[Coding.FP8]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_a_home_directory_the_codes_tiles_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_an_unusable_file_is_named_and_replaced(
    content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned_path(DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert tiles_of(DEVICE, Coding.FP8) is TILES[Coding.FP8]
    assert f"{path}: tiles are not used" in caplog.text
    tile = candidates(Coding.FP8)["few"][1]
    keep_tiles(DEVICE, {Coding.FP8: {"few": tile}})
    assert tiles_of(DEVICE, Coding.FP8).few == tile


@given(st.sampled_from(Coding), st.data())
def test_all_tiles_of_a_coding_add_up_in_one_order(coding: Coding, data: st.DataObject) -> None:
    """The inputs of a step are no part of what is measured or kept."""
    allowed = candidates(coding)
    measured = {bucket: data.draw(st.sampled_from(tiles)) for bucket, tiles in allowed.items()}
    path = keep_tiles(DEVICE, {coding: measured})
    tiles = tiles_of(DEVICE, coding)
    assert (tiles.step, tiles.few, tiles.many) == (TILES[coding].step, *measured.values())
    assert "step" not in json.loads(path.read_text())[coding.name]
    assert allowed["few"][0] == TILES[coding].few
    assert allowed["many"][0] == TILES[coding].many


def test_the_bucket_of_a_batch() -> None:
    tiles = dataclasses.replace(TILES[Coding.FP8], many=Tile(128, 64, 8, 3))
    for rows in (1, 255, 256, 5000):
        assert (tiles.choose(rows, 8) == tiles.many) == is_many(rows, 8) == (rows >= 256)

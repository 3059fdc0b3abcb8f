"""Checkpoints in the cache of huggingface_hub: which directory a name or path gives, and the model's name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.config import FrontendConfig
from eaas.errors import NotACheckpointError
from eaas.hub_cache import complete_download, find_checkpoint, model_name
from helper_process import output_of

NAMES = st.from_regex(r"[a-z0-9](?:[-._]?[a-z0-9])*", fullmatch=True)


def repository(folder: Path, *revisions: str, main: str = "") -> Path:
    """A model's folder in a cache; its snapshots have a config.json."""
    for name in ("blobs", "refs", "snapshots"):
        (folder / name).mkdir(parents=True)
    for revision in revisions:
        (folder / "snapshots" / revision).mkdir()
        (folder / "snapshots" / revision / "config.json").write_text("{}")
    if main:
        (folder / "refs" / "main").write_text(main)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache; the working directory is empty and beside it."""
    path, work = tmp_path / "hub", tmp_path / "work"
    path.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    return path


@pytest.mark.parametrize("text", ["org/demo", "org/demo/", "models--org--demo"])
def test_a_name_finds_the_snapshot_of_main(cache: Path, text: str) -> None:
    folder = repository(cache / "models--org--demo", "aaa", "bbb", main="bbb\n")
    found = find_checkpoint(text)
    assert found == folder / "snapshots" / "bbb"
    assert model_name(found) == "org/demo"
    assert FrontendConfig().model_names(found) == ("org/demo", str(found))
    named = FrontendConfig(served_model_name=["mine"])
    assert named.model_names(found) == ("mine",)


def test_a_folder_of_a_cache_that_is_elsewhere(cache: Path) -> None:
    folder = repository(cache.parent / "other" / "models--org--demo", "aaa", main="gone")
    relative = os.path.relpath(folder)
    assert find_checkpoint(relative) == Path(relative) / "snapshots" / "aaa"
    assert find_checkpoint(str(folder)) == folder / "snapshots" / "aaa"
    snapshot = str(folder / "snapshots" / "aaa")
    assert find_checkpoint(snapshot) == Path(snapshot)


def test_a_folder_that_is_mounted_under_another_name(tmp_path: Path) -> None:
    found = find_checkpoint(str(repository(tmp_path / "demo", "aaa", main="aaa")))
    assert found == tmp_path / "demo" / "snapshots" / "aaa"
    assert model_name(found) == "demo"


def test_an_existing_directory_wins(cache: Path) -> None:
    repository(cache / "models--org--demo", "aaa", main="aaa")
    Path("org/demo").mkdir(parents=True)
    assert find_checkpoint("org/demo") == Path("org/demo")
    assert model_name(Path("org/demo")) == "demo"


def test_other_directories_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "run" / "snapshots" / "step-100"
    step.mkdir(parents=True)
    assert find_checkpoint(str(step)) == step
    assert model_name(step) == "step-100"
    monkeypatch.chdir(step)
    assert model_name(Path(".")) == "step-100"


@pytest.mark.parametrize("text", ["/nowhere/demo", "demo", "./org/demo", "a/b/c"])
def test_what_has_not_the_form_of_a_name_is_a_path(cache: Path, text: str) -> None:
    repository(cache / "models--demo", "aaa", main="aaa")
    assert find_checkpoint(text) == Path(text)


def refused(text: str, *words: str) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        find_checkpoint(text)
    message = str(caught.value)
    assert "\n" not in message
    for word in (text, *words):
        assert word in message


def test_a_model_that_is_not_in_the_cache(cache: Path) -> None:
    refused("org/demo", str(cache), "hf download org/demo")
    refused("models--org--demo", str(cache), "hf download org/demo")
    empty = repository(cache / "models--org--demo", main="aaa")
    refused(str(empty), "hf download org/demo")
    # Several snapshots, of which none is that of `main`.
    several = repository(cache / "models--org--other", "aaa", "bbb", main="../../x")
    refused(str(several), str(several / "snapshots" / "aaa"), str(several / "snapshots" / "bbb"))


@pytest.mark.parametrize(
    ("variable", "under"),
    [
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_environment_names_the_cache(tmp_path: Path, variable: str, under: str) -> None:
    folder = repository(tmp_path / under / "models--org--demo", "aaa", main="aaa")
    code = "from eaas.hub_cache import find_checkpoint; print(find_checkpoint('org/demo'))"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG_"))}
    printed = output_of(sys.executable, "-c", code, env=kept | {variable: str(tmp_path)})
    assert Path(printed.strip()) == folder / "snapshots" / "aaa"


@given(NAMES, NAMES)
def test_the_name_comes_back_from_the_folder(organisation: str, name: str) -> None:
    folder = Path(f"/hub/models--{organisation}--{name}/snapshots/aaa")
    assert model_name(folder) == f"{organisation}/{name}"


def test_how_to_complete_a_download(cache: Path) -> None:
    folder = repository(cache / "models--org--demo", "aaa")
    assert "hf download org/demo)" in complete_download(str(folder / "snapshots" / "aaa"))
    assert f"--local-dir {cache})" in complete_download(str(cache))
    assert complete_download("s3://bucket/demo") == "complete the download"

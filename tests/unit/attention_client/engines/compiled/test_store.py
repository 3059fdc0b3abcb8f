"""The store of compiled passes: whole entries, of one builder at a time, in a private directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_client.engines.transformers.compiled.store import (
    LIBRARY,
    OPERATORS,
    building,
    cache_dir,
    key_of,
    library_of,
    remove_old,
)
from eaas.checkpoint import Checkpoint
from eaas.errors import ConfigError


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def build(key: str) -> None:
    with building(key) as work:
        assert work is not None
        (work / LIBRARY).write_text("code")
        (work / OPERATORS).write_text("{}")


def names() -> set[str]:
    return {path.name for path in cache_dir().iterdir()}


def test_an_entry_is_found_once_it_is_whole() -> None:
    assert library_of("a") is None
    with building("a") as work:
        assert work is not None
        (work / LIBRARY).write_text("code")
        assert library_of("a") is None
        (work / OPERATORS).write_text("{}")
    found = library_of("a")
    assert found is not None
    assert found.read_text() == "code"
    with building("a") as again:
        assert again is None


def fail(key: str) -> None:
    with building(key) as work:
        assert work is not None
        (work / LIBRARY).write_text("half")
        raise RuntimeError


def test_a_failure_leaves_nothing() -> None:
    with pytest.raises(RuntimeError):
        fail("a")
    assert library_of("a") is None
    assert names() == {"a.lock"}


def test_what_a_killed_builder_left_is_removed() -> None:
    left = cache_dir() / "a.building"
    left.mkdir()
    (left / "rest").write_text("half")
    build("a")
    assert names() == {"a", "a.lock"}
    assert not (cache_dir() / "a" / "rest").exists()


def test_one_builder_at_a_time() -> None:
    built: list[bool] = []

    def other() -> None:
        with building("a") as work:
            built.append(work is not None)

    with building("a") as work:
        assert work is not None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        (work / LIBRARY).write_text("code")
        (work / OPERATORS).write_text("{}")
    thread.join(10)
    assert built == [False]


def test_the_oldest_go() -> None:
    for number in range(11):
        build(str(number))
        os.utime(cache_dir() / str(number), (number, number))
    library_of("0")
    remove_old()
    assert {name for name in names() if name.isdigit()} == {"0", *map(str, range(4, 11))}


def test_a_directory_of_others_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir().chmod(0o777)
    with pytest.raises(ConfigError, match="other users"):
        cache_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="no directory"):
        cache_dir()


def test_keys_differ_where_the_code_does(checkpoint: Callable[..., Path]) -> None:
    first, second = (Checkpoint.open(checkpoint(arch)) for arch in ("qwen3_moe", "gpt_oss"))
    assert key_of(first, 1) == key_of(Checkpoint.open(first.path), 1)
    assert len({key_of(first, 1), key_of(first, 2), key_of(second, 1)}) == 3
    weights = min(first.path.glob("*.safetensors"))
    before = weights.stat()
    key = key_of(first, 1)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    try:
        assert key_of(first, 1) != key
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))

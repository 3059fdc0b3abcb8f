"""Files that only one user's processes can read and write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from eaas import user_files
from eaas.errors import ConfigError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The only two directories where files may stand, neither of which is there yet."""
    best, second = tmp_path / "best" / "eaas", tmp_path / "second" / "eaas"
    best.parent.mkdir()
    second.parent.mkdir()
    monkeypatch.setattr(user_files, "candidates", lambda: (best, second))
    return best, second


def test_a_document_is_private(places: tuple[Path, Path]) -> None:
    old_mask = os.umask(0)
    try:
        user_files.write("a", {"x": 1})
    finally:
        os.umask(old_mask)
    assert list(user_files.read("a")) == [{"x": 1}]
    assert user_files.place() == places[0]
    assert stat.S_IMODE(places[0].stat().st_mode) == 0o700
    (file,) = places[0].iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    user_files.write("a", {"x": 2})
    assert user_files.read_all() == {"a": {"x": 2}}
    user_files.remove("a")
    user_files.remove("a")
    assert not list(places[0].iterdir())


@pytest.mark.parametrize("spoil", ["others may read it", "a link", "a file", "another user's"])
def test_a_directory_that_is_not_private_is_ignored(
    places: tuple[Path, Path], tmp_path: Path, spoil: str
) -> None:
    best, second = places
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if spoil == "a link":
        best.symlink_to(elsewhere)
    elif spoil == "a file":
        best.touch()
    else:
        best.mkdir(mode=0o755 if spoil == "others may read it" else 0o700)
        (best / "a.json").write_text('{"planted": 1}')
    if spoil == "another user's":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(best, 65534, 65534)
    user_files.write("b", {"x": 1})
    assert user_files.place() == second
    assert user_files.read_all() == {"b": {"x": 1}}
    assert not list(elsewhere.iterdir())


def test_no_usable_directory_is_an_error(places: tuple[Path, Path]) -> None:
    for place in places:
        place.touch()
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        user_files.write("a", {})
    assert user_files.place() is None
    assert list(user_files.read("a")) == []


@pytest.mark.parametrize("spoil", ["link", "mode", "pipe", "text", "list", "huge"])
def test_a_file_that_others_could_have_written_is_ignored(
    places: tuple[Path, Path], tmp_path: Path, spoil: str
) -> None:
    user_files.write("a", {"x": 1})
    file = places[0] / "a.json"
    if spoil == "mode":
        file.chmod(0o644)
    else:
        file.unlink()
        if spoil == "link":
            target = tmp_path / "target"
            target.write_text('{"planted": 1}')
            file.symlink_to(target)
        elif spoil == "pipe":
            os.mkfifo(file, 0o600)
        else:
            content = {"text": "no JSON", "list": "[1]", "huge": '{"a": "' + "x" * 100_000 + '"}'}
            file.write_text(content[spoil])
            file.chmod(0o600)
    assert list(user_files.read("a")) == []
    assert user_files.read_all() == {}


def test_an_old_document_in_another_directory_does_not_hide_the_new(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, second = places
    monkeypatch.setattr(user_files, "candidates", lambda: (second,))
    user_files.write("a", {"x": 1})
    monkeypatch.setattr(user_files, "candidates", lambda: (best, second))
    assert list(user_files.read("a")) == [{"x": 1}]
    user_files.write("a", {"x": 2})
    assert list(user_files.read("a")) == [{"x": 2}]


def test_shells_with_different_variables_share_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/somewhere")
    with_runtime = user_files.candidates()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", "/odd/place")
    assert with_runtime[0] == Path("/somewhere/eaas")
    assert with_runtime[1:] == user_files.candidates()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert with_runtime[1:] == user_files.candidates()
    assert Path(f"/tmp/eaas-{os.geteuid()}") in with_runtime


def test_the_lock_is_exclusive_but_a_stopped_process_does_not_block(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files, "_LOCK_S", 0.05)
    with user_files.change(), user_files.change():
        user_files.write("a", {"x": 1})
    assert list(user_files.read("a")) == [{"x": 1}]

"""A package that is installed beside ours, with entry points."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    module: str,
    entries: Mapping[str, str],
    source: str | None = None,
) -> None:
    """Install entry points (name: object of the module) in a folder, and the module if it has a source.

    Undone with the monkeypatch.
    """
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    lines = [f"{name} = {module}:{place}" for name, place in entries.items()]
    (info / "entry_points.txt").write_text("\n".join((f"[{group}]", *lines)) + "\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)

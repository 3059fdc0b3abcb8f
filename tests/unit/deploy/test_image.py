"""The image is built from a part of the repository, from which the package must build."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_files_that_the_image_gets_are_enough_to_build(tmp_path: Path) -> None:
    for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], tmp_path / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
            else:
                shutil.copy(source, target)
    # It reads each source, and each header that one includes.
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True)
    [top] = tmp_path.glob("*.egg-info/top_level.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(top.read_text().split()) == {name.removesuffix("*") for name in names}

"""A copy of the working tree with its compiled modules, for tests that change and rebuild it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["ROOT", "working_copy"]

ROOT = Path(__file__).parents[2]


def working_copy(target: Path) -> Path:
    """Copy what git knows or would add, and the compiled modules. Returns the target."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.abi3.so")]
    for name in (*listed, *compiled):
        if (ROOT / name).is_file() and not name.startswith("."):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target

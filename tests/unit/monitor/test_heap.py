"""Objects that survive two collections are not looked at again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc
from monitor.main import spare_long_lived

spare_long_lived()
kept = [[] for _ in range(50_000)]
assert len(gc.get_objects(generation=2)) < 25_000, "the last collection froze the others"
before = gc.get_freeze_count()
assert before >= 25_000
del kept
gc.collect(1)
assert gc.get_freeze_count() < before, "reference counts free frozen objects"
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects in small steps")
def test_long_lived_objects_are_frozen_and_still_freed() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)

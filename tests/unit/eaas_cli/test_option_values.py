"""Values of options."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.errors import ConfigError
from eaas_cli.option_values import refuse_unwritable


def test_a_file_that_cannot_be_written_is_refused_and_others_stay(tmp_path: Path) -> None:
    for wanted in (tmp_path, tmp_path / "absent" / "x", Path("/proc/self/x")):
        with pytest.raises(ConfigError, match=f"--out {wanted}: .*; give another file"):
            refuse_unwritable("--out", wanted)
    former = tmp_path / "former"
    former.write_text("kept")
    refuse_unwritable("--out", former)
    refuse_unwritable("--out", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["former"]
    assert former.read_text() == "kept"

"""What `eaas up` prints once it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.config import ClusterConfig
from eaas_cli.commands.greeting import passes_text


@pytest.mark.parametrize(
    ("engine", "compiles", "has_compiler", "lines"),
    [
        ("transformers", True, False, 1),
        ("transformers", True, True, 0),
        ("transformers", False, False, 0),
        ("vllm", True, False, 0),
    ],
)
def test_who_would_compile_without_a_compiler_is_told_what_is_slower(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    compiles: bool,
    has_compiler: bool,
    lines: int,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_compiler:
        (tmp_path / "g++").write_text("#!/bin/sh\n")
        (tmp_path / "g++").chmod(0o755)
    config = ClusterConfig.model_validate({"attention_client": {"compile": compiles}})
    text = passes_text(engine, config)
    assert (text.count("\n"), "g++" in text) == (lines, bool(lines))

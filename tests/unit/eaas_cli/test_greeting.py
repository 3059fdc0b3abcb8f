"""What `eaas up` prints once it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.config import ClusterConfig
from eaas_cli.commands.greeting import passes_text


def test_who_would_compile_without_a_compiler_is_told_what_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled, eager = (
        ClusterConfig.model_validate({"attention_client": {"compile": compiles}})
        for compiles in (True, False)
    )
    told = passes_text("transformers", compiled)
    assert (told.count("\n"), "g++" in told) == (1, True)
    assert passes_text("transformers", eager) == passes_text("vllm", compiled) == ""
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    assert passes_text("transformers", compiled) == ""

"""What `eaas up` prints once it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.config import ClusterConfig
from eaas_cli.commands.greeting import passes_text


def compiling(wanted: bool) -> ClusterConfig:
    return ClusterConfig.model_validate({"attention_client": {"compile": wanted}})


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_a_machine_without_a_compiler_is_told_what_is_slower() -> None:
    text = passes_text("transformers", compiling(True))
    assert "g++" in text
    assert text.count("\n") == 1


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("engine", "compiles"), [("vllm", True), ("transformers", False)])
def test_who_compiles_nothing_is_told_nothing(engine: str, compiles: bool) -> None:
    assert passes_text(engine, compiling(compiles)) == ""


def test_a_machine_with_a_compiler_is_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert passes_text("transformers", compiling(True)) == ""

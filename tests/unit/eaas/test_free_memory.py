"""Free memory of machine and container."""

from __future__ import annotations

from pathlib import Path

from eaas.free_memory import available_bytes, free_bytes


def test_a_containers_limit_counts_without_what_the_kernel_can_drop(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert free_bytes(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 600\nactive_file 50\n")
    assert free_bytes(tmp_path) == 750
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes(tmp_path) == 0


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    assert 0.5 < free_bytes(tmp_path) / available_bytes() < 2
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert 0.5 < free_bytes(tmp_path) / available_bytes() < 2

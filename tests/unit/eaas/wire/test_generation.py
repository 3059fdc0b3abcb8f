"""A reader loads the generation after everything else."""

from __future__ import annotations

import pytest

from eaas.wire import Arena


class Fence:
    """Flags whose fence lets in what another core has stored meanwhile, as on a weakly ordered one."""

    def __init__(self, arena: Arena, arriving: int) -> None:
        self.arena, self.arriving = arena, arriving

    def fence(self) -> None:
        self.arena.set_generation(0, self.arriving)


def test_the_generation_is_read_after_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create_local(1, 64, 64, 1)
    arena.set_generation(0, 1)
    assert arena.generation(0) == 1
    flags = arena.flags
    monkeypatch.setattr(arena, "flags", Fence(arena, 2))
    assert arena.generation(0) == 2
    monkeypatch.setattr(arena, "flags", flags)
    arena.close()

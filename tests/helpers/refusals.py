"""Processes that refuse to start."""

from __future__ import annotations

import pytest

from eaas.errors import EaasError
from eaas_cli.local.process import ChildProcess, wait_ready

__all__ = ["refusal"]

_PATIENCE_S = 60.0


def refusal(child: ChildProcess) -> str:
    """The one line with which a process ends before it serves; its exit code is 2."""
    with pytest.raises(EaasError) as caught:
        wait_ready([child], _PATIENCE_S)
    assert child.reap(_PATIENCE_S)
    assert child.process.returncode == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)

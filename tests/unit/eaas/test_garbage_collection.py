"""The collector is off inside the outermost block only."""

from __future__ import annotations

import gc

import pytest

from eaas.garbage_collection import collector_off


def test_the_outer_block_decides() -> None:
    with collector_off():
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_on_again_after_an_error() -> None:
    with pytest.raises(ImportError), collector_off():
        raise ImportError
    assert gc.isenabled()

"""The collector is off inside the block only."""

from __future__ import annotations

import gc
from importlib import import_module

import pytest

from eaas.garbage_collection import collector_off


def test_off_inside_and_on_again() -> None:
    assert gc.isenabled()
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_on_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), collector_off():
        import_module("no_such_module")
    assert gc.isenabled()


def test_the_outer_block_decides() -> None:
    with collector_off():
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()

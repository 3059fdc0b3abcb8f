"""All errors have one base class, a docstring and an entry in `__all__`."""

from __future__ import annotations

import inspect

import pytest

from eaas import errors
from eaas.errors import EaasError, ExpertsUnavailableError

CLASSES = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if item.__module__ == errors.__name__
]


def test_all_is_complete() -> None:
    assert sorted(errors.__all__) == sorted(item.__name__ for item in CLASSES)


@pytest.mark.parametrize("item", CLASSES)
def test_base_class_and_docstring(item: type[Exception]) -> None:
    assert issubclass(item, EaasError)
    assert "__doc__" in vars(item)
    assert (item.__doc__ or "").strip()
    assert item.__name__.endswith("Error")


def test_experts_unavailable_names_layer_and_experts() -> None:
    error = ExpertsUnavailableError(3, range(10), "nobody is there")
    assert (error.layer, error.experts) == (3, tuple(range(10)))
    assert str(error) == (
        "layer 3: no live replica of expert(s) 0, 1, 2, 3, 4, 5, 6, 7, ...: nobody is there"
    )
    assert "..." not in str(ExpertsUnavailableError(3, range(8), "nobody is there"))

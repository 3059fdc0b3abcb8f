"""All errors have one base class and an entry in `__all__`."""

from __future__ import annotations

import inspect

from eaas import errors
from eaas.errors import EaasError, ExpertsUnavailableError


def test_all_is_complete_and_of_one_base() -> None:
    found = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__
    ]
    assert sorted(errors.__all__) == sorted(item.__name__ for item in found)
    assert all(issubclass(item, EaasError) for item in found)


def test_experts_unavailable_names_layer_and_experts() -> None:
    error = ExpertsUnavailableError(3, range(10), "nobody is there")
    assert (error.layer, error.experts) == (3, tuple(range(10)))
    assert str(error) == (
        "layer 3: no live replica of expert(s) 0, 1, 2, 3, 4, 5, 6, 7, ...: nobody is there"
    )
    assert "..." not in str(ExpertsUnavailableError(3, range(8), "nobody is there"))

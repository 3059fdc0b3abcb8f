"""Times of expert servers, fitted to a benchmark's document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.caps import fit_calls, read_fits
from eaas.errors import ConfigError

EXPERTS, TOP_K = 128, 8


Call = tuple[float, float, float]


def calls(fixed_s: float, load_s: float, pair_s: float, tokens: list[int]) -> list[Call]:
    found = []
    for count in tokens:
        active = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** count)
        pairs = count * TOP_K
        found.append((active, pairs, fixed_s + max(load_s * active, pair_s * pairs)))
    return found


@given(st.floats(0, 1e-3), st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-4))
def test_exact_times_are_fitted(fixed_s: float, load_s: float, pair_s: float) -> None:
    measured = calls(fixed_s, load_s, pair_s, [1, 2, 8, 64, 512, 1024, 4096, 8192])
    assert fit_calls(measured).worst_error < 1e-6


def test_no_time_is_negative() -> None:
    """Calls that get shorter with more work: no law fits, and none of the times is below zero."""
    found = fit_calls([(1, 1, 3.0), (2, 2, 2.0), (3, 3, 1.0)])
    assert min(found.fixed_s, found.load_s, found.pair_s) >= 0
    assert 0.3 < found.worst_error < 2


def row(tokens: int, seconds: float) -> dict:
    return {
        **{"shape": f"2048,768,{EXPERTS},{TOP_K}", "dtype": "int8", "kernel": "native"},
        **{"tokens": tokens, "ms": 1e3 * seconds},
    }


def test_a_document(tmp_path: Path) -> None:
    sizes = [1, 8, 64, 512, 2048]
    measured = calls(0.0, 4e-4, 2e-5, sizes)
    rows = [row(n, seconds) for n, (_, _, seconds) in zip(sizes, measured, strict=True)]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": rows}))
    ((kernel, found),) = read_fits(path).items()
    assert kernel == ("2048,768,128,8", "int8", "native")
    assert found.load_s == pytest.approx(4e-4)
    assert found.pair_s == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "no document"),
        ('{"rows": [{}]}', "no document"),
        ('{"rows": []}', "at least 3 batch sizes"),
        (json.dumps({"rows": [row(1, 1.0), row(2, 1.0)]}), "at least 3 batch sizes"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_fits(path)
    with pytest.raises(ConfigError, match="gone"):
        read_fits(tmp_path / "gone.json")

"""`--plot FILE.png` of the commands that have it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eaas.errors import ConfigError
from eaas_cli.bench.experts import report
from eaas_cli.plot import Line, check_plot, draw_plot

PNG = b"\x89PNG"


def test_a_plot_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'expert-as-a-service\[bench\]'"):
        check_plot(tmp_path / "x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    check_plot(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"x\.jpg: give the name of a \.png file"):
        check_plot(tmp_path / "x.jpg")
    with pytest.raises(
        ConfigError, match=r"absent/x\.png: No such file or directory; give another"
    ):
        check_plot(tmp_path / "absent" / "x.png")


def test_lines_in_panels(tmp_path: Path) -> None:
    """More lines than colours, in panels that have not all of them."""
    pytest.importorskip("matplotlib")
    lines = [Line(f"line {n}", [1, 2], [n, n + 1], [0.1, 0.2]) for n in range(12)]
    draw_plot(tmp_path / "x.png", {"all": lines, "two": lines[-2:]}, "x", "y", limit=1.0)
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)
    assert "matplotlib.pyplot" not in sys.modules


def test_fractions_of_the_roofline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"shape": shape, "kernel": "native", "dtype": "int8", "tokens": t, "roofline_fraction": 0.5}
        for shape in ("64,32,4,2", "32,32,4,2")
        for t in (1, 8)
    ]
    report.draw({"rows": rows}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)

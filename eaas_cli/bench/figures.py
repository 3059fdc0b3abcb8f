"""Rounding of the figures in a benchmark's document."""

__all__ = ["figure"]


def figure(value: float) -> float:
    """Round a figure to four significant digits, for a benchmark's document."""
    return float(f"{value:.4g}")

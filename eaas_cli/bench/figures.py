"""Figures of a document."""

__all__ = ["figure"]


def figure(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")

"""How many pairs of an expert take as long as reading its weights, fitted to the servers' answers. No I/O."""

from __future__ import annotations

from attention_client.dispatch.parts import LOAD_PAIRS

__all__ = ["LoadFit"]

# What the default weighs, in answers, and how much of what is known an answer replaces.
_PRIOR = 4.0
_KEPT = 1 - 1 / 500
# Beyond this, one of the two cannot be told from the answers.
_LEAST, _MOST = 1.0, 512.0
# No answer is that short; its squares would overflow.
_SHORTEST_UNITS = 1e-9


class LoadFit:
    """Fits seconds = a x experts + b x pairs to a client's answers; `load_pairs` is a / b. Not thread-safe.

    Weighted least squares of the relative error, with the default as a prior, so that answers of one size,
    which cannot tell the two apart, change little. Old answers fade.
    """

    def __init__(self) -> None:
        # Of the default: an answer that only reads an expert takes 1, and so do LOAD_PAIRS pairs alone.
        self._prior = (_PRIOR, 0.0, _PRIOR * LOAD_PAIRS**2, _PRIOR, _PRIOR * LOAD_PAIRS)
        self._sums = [0.0] * 5
        self.load_pairs = LOAD_PAIRS

    def observe(self, experts: float, pairs: float, units: float) -> None:
        """Record that an answer took so many units of work of its server (seconds over its usual rate)."""
        if not units > _SHORTEST_UNITS or experts < 0:
            return
        x, y = experts / units, pairs / units
        new = (x * x, x * y, y * y, x, y)
        self._sums = [_KEPT * old + add for old, add in zip(self._sums, new, strict=True)]
        xx, xy, yy, xt, yt = (p + s for p, s in zip(self._prior, self._sums, strict=True))
        size = xx * yy - xy * xy
        a, b = xt * yy - yt * xy, yt * xx - xt * xy
        if size > 0 and a > 0 and b > 0:
            self.load_pairs = min(max(a / b, _LEAST), _MOST)

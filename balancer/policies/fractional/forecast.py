"""The policy `fractional` forecasts experts' loads in the next window, by the most accurate model so far.

Every model is a weighted sum of *blocks* (means over parts of a window): means of the last few blocks for
loads that jump, of many for loads that stay, straight lines for loads that drift. The model is chosen layer
by layer, by its errors in forecasting known blocks.
Shape suffixes: N blocks, M forecasts (models), W window, B scenarios, L layers, E logical experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["forecast", "scenarios"]

Float = npt.NDArray[np.float64]

_MEANS = (2, 4, 8, 16, 32)
_LINES = (8, 16, 32)
# No forecast falls below this part of the latest load.
_LEAST_PART = 0.25


def forecast(blocks_NLE: Float, ahead: int, parts: int) -> Float:
    """Forecast the mean loads in parts of the future.

    Args:
        blocks_NLE: Known blocks, oldest first.
        ahead: Length of the future, in blocks.
        parts: Number of parts to forecast.

    Returns:
        float64 (parts, L, E), at least 0.
    """
    count, layers, experts = blocks_NLE.shape
    flat_NX = blocks_NLE.reshape(count, -1)
    # Step 1: every model's errors on known blocks.
    starts = [n for n in range(count // 2, count) if n >= 4]
    error_ML = np.zeros((len(_MEANS) + len(_LINES), layers))
    for start in starts[:: max(1, len(starts) // 6)]:
        span = min(ahead, count - start)
        truth_LE = blocks_NLE[start : start + span].mean(axis=0)
        weights_MN = np.stack([model[0] for model in _models(start, span, 1)])
        guess_MLE = (weights_MN @ flat_NX[:start]).reshape(-1, layers, experts)
        # Long forecasts weigh more; with few known blocks there are only short ones.
        error_ML += span * ((guess_MLE - truth_LE) ** 2).sum(axis=2)
    # Step 2: the best model of each layer.
    best_L = error_ML.argmin(axis=0)
    models = _models(count, ahead, parts)
    said_PLE = np.empty((parts, layers, experts))
    for model in np.unique(best_L):
        mine_L = best_L == model
        said_PLE[:, mine_L] = np.tensordot(models[model], blocks_NLE[:, mine_L], 1)
    # Step 3: keep a straight line from taking a load to 0.
    least_LE = _LEAST_PART * blocks_NLE[-2:].mean(axis=0)
    return np.asarray(np.maximum(said_PLE, least_LE))


def scenarios(window_WLE: npt.NDArray[Any], blocks_NLE: Float, said_BLE: Float) -> Float:
    """float64 (B, L, E): forecasts plus the noise of single iterations of the window.

    Their mean is the forecasts' mean, so that experts without tokens in these iterations keep their load.
    """
    iterations, count = len(window_WLE), len(said_BLE)
    chosen_B = ((np.arange(count) + 0.5) * iterations / count).astype(np.int64)
    block_B = chosen_B * len(blocks_NLE) // iterations
    usual_BLE = blocks_NLE[block_B]
    noise_BLE = np.divide(
        window_WLE[chosen_B], usual_BLE, out=np.zeros_like(usual_BLE), where=usual_BLE > 0
    )
    mean_LE = noise_BLE.mean(axis=0)
    level_BLE = np.divide(noise_BLE, mean_LE, out=np.ones_like(noise_BLE), where=mean_LE > 0)
    return np.asarray(said_BLE * level_BLE)


def _models(count: int, ahead: int, parts: int) -> list[Float]:
    """Return each model's weights of `count` blocks for each part of the future, (parts, count)."""
    centre_P = (np.arange(parts) + 0.5) * ahead / parts - 0.5
    weights = []
    for length in _MEANS:
        used = min(length, count)
        mean_N = np.zeros(count)
        mean_N[count - used :] = 1 / used
        weights.append(np.tile(mean_N, (parts, 1)))
    for length in _LINES:
        used = min(length, count)
        x_N = np.arange(used) - (used - 1) / 2
        # Least squares: the mean, plus the slope times the distance from the middle.
        slope_N = x_N / max(1.0, float(x_N @ x_N))
        way_P = centre_P + (used + 1) / 2
        line_PN = np.zeros((parts, count))
        line_PN[:, count - used :] = 1 / used + way_P[:, None] * slope_N
        weights.append(line_PN)
    return weights

"""Knobs that were learned from traces (`eaas knobs train`): a file of them, and what it says of a window.

    features of a window, standardised --tanh--> hidden --sigmoid, between two bounds--> knobs of ScalpeLB

A safetensors file: a tensor for each array of `LearnedKnobs`, and in the metadata, as JSON, `provenance`
(what it was trained on) and `held_out` (what it came to on traces that it was not trained on, beside the
static defaults). A balancer uses it only if it was better there.
Shape suffixes: F features, N hidden units, K knobs, W window, L layers, E logical experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from balancer.live.signals import burstiness
from balancer.live.tuner import Looked, Tuned
from balancer.policies.window import shift, variance_buffer
from eaas.errors import ConfigError

__all__ = [
    "BOUNDS",
    "FEATURES",
    "KNOBS",
    "HeldOut",
    "KnobFile",
    "LearnedKnobs",
    "LearnedTuner",
    "features",
    "read_knobs",
    "static_knobs",
    "write_knobs",
]

Float = npt.NDArray[np.float64]

FORMAT = "eaas-knobs-1"
KNOBS = ("k", "shift_tv", "budget", "drift_tol", "heavy_frac")
BOUNDS = {
    "k": (0.0, 4.0),
    "shift_tv": (0.02, 1.0),
    "budget": (0.0, 12.0),
    "drift_tol": (0.0, 0.6),
    "heavy_frac": (0.02, 0.98),
}
FEATURES = ("burstiness", "shift", "skew", "redundancy", "log_experts_per_server", "log_tokens")
_STATIC = {"shift_tv": 0.2, "budget": 8.0, "drift_tol": 0.2, "heavy_frac": 0.5}
# Of a knob's range: what is nearer than that to the one in use is no reason to change it.
_BAND = 0.1


def features(window_WLE: npt.NDArray[np.number], servers: int, slots: int) -> Float:
    """float64 (F): what is known of a window, in the order of `FEATURES`."""
    load_LE = window_WLE.sum(axis=0, dtype=np.float64)
    tokens_L = load_LE.sum(axis=1)
    layers, experts = load_LE.shape
    part_LE = load_LE[tokens_L > 0] / tokens_L[tokens_L > 0, None]
    skew = np.sqrt(np.maximum(experts * (part_LE**2).sum(axis=1) - 1, 0.0))
    return np.array(
        [
            burstiness(window_WLE),
            shift(window_WLE).mean(),
            skew.mean() if len(skew) else 0.0,
            slots / experts - 1,
            math.log2(experts / servers),
            math.log10(1 + tokens_L.sum() / layers),
        ]
    )


def static_knobs(experts: int) -> Float:
    """float64 (K): ScalpeLB's own, for that many experts."""
    return np.array([variance_buffer(experts), *(_STATIC[name] for name in KNOBS[1:])])


@dataclass(frozen=True, eq=False)
class LearnedKnobs:
    """The network. All arrays are float64.

    Attributes:
        mean_F, scale_F: Of the features it was trained on.
        hidden_NF, hidden_N: Weights and biases of the hidden units.
        out_KN, out_K: Those of the knobs.
    """

    mean_F: Float
    scale_F: Float
    hidden_NF: Float
    hidden_N: Float
    out_KN: Float
    out_K: Float

    def __call__(self, features_F: Float) -> dict[str, float | int]:
        """Knobs by name, as `policies.scalpel` takes them."""
        x_F = (features_F - self.mean_F) / self.scale_F
        hidden_N = np.tanh(self.hidden_NF @ x_F + self.hidden_N)
        part_K = 1 / (1 + np.exp(-(self.out_KN @ hidden_N + self.out_K)))
        found: dict[str, float | int] = {}
        for name, part in zip(KNOBS, part_K.tolist(), strict=True):
            low, high = BOUNDS[name]
            found[name] = round(low + (high - low) * part, 4)
        found["budget"] = round(found["budget"])
        return found


@dataclass(frozen=True)
class HeldOut:
    """A trace that was not trained on, replayed with both: cost = mean PAR + lambda * transit.

    Attributes:
        trace: Its name.
        sha256: Of its counts.
        servers, interval: Of the replay.
        static_cost, learned_cost: With the lambda that was trained for.
        static_par, learned_par: Means.
        static_transit, learned_transit: Replicas loaded.
    """

    trace: str
    sha256: str
    servers: int
    interval: int
    static_cost: float
    learned_cost: float
    static_par: float
    learned_par: float
    static_transit: int
    learned_transit: int


@dataclass(frozen=True, eq=False)
class KnobFile:
    """What is in a file.

    Attributes:
        knobs: The network.
        held_out: At least one trace.
        provenance: JSON values: what it was trained on, and how.
    """

    knobs: LearnedKnobs
    held_out: Sequence[HeldOut]
    provenance: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Cost with these knobs over cost with the static defaults, mean of the traces held out."""
        return float(np.mean([run.learned_cost / run.static_cost for run in self.held_out]))

    @property
    def wins(self) -> bool:
        """Whether it was better than the static defaults."""
        return self.ratio < 1


def write_knobs(path: Path, file: KnobFile) -> None:
    """Raises ConfigError where no file can be written there."""
    arrays = {
        f.name: np.ascontiguousarray(getattr(file.knobs, f.name)) for f in fields(LearnedKnobs)
    }
    metadata = {
        "format": FORMAT,
        "held_out": json.dumps([vars(run) for run in file.held_out]),
        "provenance": json.dumps(dict(file.provenance)),
    }
    try:
        save_file(arrays, path, metadata)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written ({error}): choose another place") from error


def read_knobs(path: Path, *, must_win: bool) -> KnobFile:
    """A file of `write_knobs`.

    Args:
        path: Where it is.
        must_win: It is to be used on a live cluster.

    Raises:
        ConfigError: It is not there or no such file; or it has to win, and did not. One line.
    """
    try:
        with safe_open(path, framework="numpy") as stored:
            metadata = stored.metadata() or {}
            arrays = {f.name: stored.get_tensor(f.name) for f in fields(LearnedKnobs)}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        held_out = [HeldOut(**run) for run in json.loads(metadata["held_out"])]
        file = KnobFile(_checked(arrays), held_out, json.loads(metadata["provenance"]))
        if not (held_out and 0 < file.ratio < math.inf):
            raise ValueError("it does not say how it did on traces held out")
    # Whatever safetensors, json and the arrays make of a file that is another one.
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} has no knobs of `eaas knobs train` ({what})") from error
    if must_win and not file.wins:
        raise ConfigError(
            f"{path}: these knobs lost to the static defaults on the traces held out (they cost "
            f"{100 * file.ratio:.2f} % of what those do), so they are not used: balancer.knobs: static"
        )
    return file


def _checked(arrays: Mapping[str, npt.NDArray[Any]]) -> LearnedKnobs:
    """Raises ValueError where they are not of one network."""
    knobs = LearnedKnobs(**arrays)
    hidden = knobs.hidden_N.size
    shapes = {
        "mean_F": (len(FEATURES),),
        "scale_F": (len(FEATURES),),
        "hidden_NF": (hidden, len(FEATURES)),
        "hidden_N": (hidden,),
        "out_KN": (len(KNOBS), hidden),
        "out_K": (len(KNOBS),),
    }
    for name, shape in shapes.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.float64 or not np.isfinite(array).all():
            raise ValueError(
                f"{name} has {array.dtype} {array.shape}, wanted finite float64 {shape}"
            )
    if not (knobs.scale_F > 0).all():
        raise ValueError("scale_F is not above 0")
    return knobs


class LearnedTuner:
    """Sets the policy's knobs by a network; where it says nearly the same as before, they stay."""

    def __init__(self, knobs: LearnedKnobs) -> None:
        self._knobs = knobs
        self._used: dict[str, float | int] = {}

    def look(self, looked: Looked) -> Tuned:
        """See `Tuner`."""
        seen_F = features(looked.window_WLE, looked.servers, looked.slots)
        said = self._knobs(seen_F)
        if self._used and all(self._is_near(name, value) for name, value in said.items()):
            return Tuned(self._used)
        self._used = said
        seen = ", ".join(f"{name} {v:.2f}" for name, v in zip(FEATURES, seen_F, strict=True))
        return Tuned(said, reasons=(f"learned for {seen}",))

    def _is_near(self, name: str, value: float) -> bool:
        low, high = BOUNDS[name]
        return abs(value - self._used[name]) <= _BAND * (high - low)

"""Checks the arguments of `plan` and makes a Problem; a ValueError names the wrong argument."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.anti_affinity import Nodes
from balancer.policies.sparse import Layout
from balancer.policies.token_ids import are_token_ids
from balancer.policies.types import Float, Int, Plan, Problem
from eaas.log import one_line

__all__ = [
    "array",
    "checked_load",
    "checked_number",
    "checked_window",
    "like",
    "make_problem",
    "refuse_token_ids",
]

# Highest accepted load: far above any count; low enough for sums and for EPLB's float32.
_MOST_LOAD = 1e30


def make_problem(
    load_LE: npt.ArrayLike,
    servers: int,
    slots: int | npt.ArrayLike,
    current: Plan | Layout | npt.ArrayLike | None = None,
    speeds_S: npt.ArrayLike | None = None,
    nodes_S: npt.ArrayLike | None = None,
) -> Problem:
    """Check the arguments of `plan` (described there) and make a Problem.

    Raises:
        ValueError: An argument is wrong, or the slots do not cover the experts.
    """
    load = checked_load("load_LE", load_LE, 2)
    layers, experts = load.shape
    if not isinstance(servers, (int, np.integer)) or servers < 1:
        raise ValueError(f"servers is {servers}, must be a whole number of at least 1")
    servers = int(servers)
    asked_LS = _slots(slots, layers, servers)
    # A second replica of an expert on one server is of no use.
    slots_LS = np.minimum(asked_LS, experts)
    usable = int(slots_LS.sum(axis=1).min())
    if usable < experts:
        raise ValueError(f"slots: {usable} replicas per layer cannot cover {experts} experts")
    return Problem(
        load_LE=load,
        slots_LS=slots_LS,
        asked_LS=asked_LS,
        speeds_S=_speeds(speeds_S, servers),
        current=_current(current, (layers, servers, experts)),
        shares_known=isinstance(current, (Plan, Layout)),
        nodes=_nodes(nodes_S, servers),
    )


def checked_load(name: str, given: npt.ArrayLike, dimensions: int) -> Float:
    """Check a policy's loads and convert them to float64. Raises ValueError with the argument's name."""
    load: Float = np.ascontiguousarray(_checked(name, given, dimensions), dtype=np.float64)
    return load


def checked_window(
    name: str, given: npt.ArrayLike, shape_LE: tuple[int, int] | None = None
) -> npt.NDArray[np.number]:
    """Check loads by step, keeping their type. Raises ValueError with the argument's name."""
    window_WLE = _checked(name, given, 3)
    if shape_LE is not None and window_WLE.shape[1:] != shape_LE:
        raise ValueError(
            f"{name} has shape {window_WLE.shape}, wanted (W, {shape_LE[0]}, {shape_LE[1]})"
        )
    return window_WLE


def refuse_token_ids(name: str, given_ALC: npt.NDArray[Any]) -> None:
    """Raise ValueError, with the argument's name, if an array has ids of tokens' experts instead of loads."""
    if are_token_ids(given_ALC):
        raise ValueError(
            f"{name} has shape {given_ALC.shape}, wanted (window, layers, experts), and looks like the ids "
            "of each token's experts (tokens, layers, top-k): count ids with "
            "balancer.policies.count_token_ids, give loads of so few experts as floats"
        )


def checked_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    most: float = math.inf,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Raise ValueError, with the argument's name, unless value is a number from least to most.

    Args:
        whole: Whether the value must be a whole number.
        above: Whether the value must be above least; it may then be infinite.
    """
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if fits and (least < value <= most if above else least <= value <= most and value < math.inf):
        return
    kind = "a whole number" if whole else "a number" if above else "a finite number"
    wanted = f"above {least:g}" if above else f"of at least {least:g}"
    upto = "" if most == math.inf else f", at most {most:g}"
    raise ValueError(f"{name} is {value!r}, must be {kind} {wanted}{upto}")


def _checked(name: str, given: npt.ArrayLike, dimensions: int) -> npt.NDArray[np.number]:
    load = array(name, given)
    if not (np.issubdtype(load.dtype, np.floating) or np.issubdtype(load.dtype, np.integer)):
        raise ValueError(f"{name} has {load.dtype}, wanted numbers")
    if load.ndim != dimensions or load.size == 0:
        wanted = ("layers x experts", "window x layers x experts")[dimensions - 2]
        raise ValueError(f"{name} has shape {load.shape}, wanted {wanted}, none of them 0")
    # As a Python number: float16 cannot hold the limit.
    most = float(load.max())
    # A NaN is not at least 0, and infinity is not below it.
    if not (most < np.inf and (load.dtype.kind == "u" or load.min() >= 0)):
        raise ValueError(f"{name} has numbers that are negative, NaN or infinite")
    if most > _MOST_LOAD:
        raise ValueError(f"{name} has numbers above {_MOST_LOAD:g}: scale them down")
    return load


def array(name: str, given: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Convert a caller's argument to an array: a list, an array, or a tensor of any type on any device.

    Raises ValueError with the argument's name.
    """
    try:
        if _torch_of(given):
            given = given.detach().cpu()
            # NumPy lacks torch's short floats, such as bfloat16.
            given = (given.double() if given.is_floating_point() else given).numpy()
        return np.asarray(given, dtype)
    # torch raises a RuntimeError for a tensor without values (on the meta device).
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: {one_line(error)}") from error


def like(given: object, *found: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return arrays as tensors on the CPU if the caller gave a tensor; else as they are."""
    torch = _torch_of(given)
    return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in found) if torch else found


def _torch_of(given: object) -> Any | None:
    """Return the module torch if an argument is a tensor. The balancer itself does not import torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(given, torch.Tensor) else None


def _slots(slots: int | npt.ArrayLike, layers: int, servers: int) -> Int:
    given = array("slots", slots)
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"slots must be whole numbers, not {given.dtype}")
    if given.ndim == 0:
        each, more = divmod(int(given), servers)
        given = np.full(servers, each) + (np.arange(servers) < more)
    if given.shape not in ((servers,), (layers, servers)):
        raise ValueError(
            f"slots has shape {given.shape}, wanted one number, ({servers},) or ({layers}, {servers})"
        )
    given = given.astype(np.int64)
    if given.min() < 0:
        raise ValueError("slots has numbers below 0")
    return np.ascontiguousarray(np.broadcast_to(given, (layers, servers)))


def _speeds(speeds_S: npt.ArrayLike | None, servers: int) -> Float:
    if speeds_S is None:
        return np.ones(servers)
    speeds = np.ascontiguousarray(array("speeds_S", speeds_S, np.float64))
    if speeds.shape != (servers,):
        raise ValueError(f"speeds_S has shape {speeds.shape}, wanted ({servers},)")
    if not (speeds.min() > 0 and speeds.max() < np.inf):
        raise ValueError("speeds_S must be finite and above 0")
    return speeds


def _nodes(nodes_S: npt.ArrayLike | None, servers: int) -> Nodes | None:
    if nodes_S is None:
        return None
    nodes = array("nodes_S", nodes_S)
    whole = np.issubdtype(nodes.dtype, np.integer) and nodes.size and nodes.min() >= 0
    if nodes.shape != (servers,) or not (whole or nodes.dtype.kind == "U"):
        raise ValueError(f"nodes_S must be {servers} names, or whole numbers of at least 0")
    return Nodes.of(nodes.tolist())


def _current(
    current: Plan | Layout | npt.ArrayLike | None, shape: tuple[int, int, int]
) -> Layout | None:
    if current is None:
        return None
    if isinstance(current, (Plan, Layout)):
        layout = current.layout if isinstance(current, Plan) else current
        if layout.shape != shape:
            raise ValueError(f"current has shape {layout.shape}, wanted {shape}")
        return layout
    holds = array("current", current)
    if holds.shape != shape or holds.dtype != np.bool_:
        raise ValueError(f"current has {holds.dtype} {holds.shape}, wanted bool {shape}")
    return Layout.of(holds)

"""Reads dumps of SGLang's expert-distribution recorder as traces (`expert_distribution_recorder_*.pt`).

A .pt of something else may hold plain tensors, which are returned as they are. torch reads the file with
`weights_only`: tensors and plain data, never code.

`stat` and `stat_approx` dump {"logical_count": (buffered passes, L, E), ...}: one forward pass is one
iteration. Unfilled places of the ring buffer are zero and left out. If the buffer has wrapped around
(`--expert-distribution-recorder-buffer-size`; -1: unlimited), its oldest passes are lost and the order starts
somewhere in the middle.

`per_pass` and `per_token` dump {"records": [{"forward_pass_id", "global_physical_count": (L, P), ...}],
"last_physical_to_logical_map": (L, P)}, a file for each rank. Records of one pass are added up, physical
experts to logical ones by the last map.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError
from simulator.traces.arrays import MOST_EXPERTS, Arrays
from simulator.traces.trace import Trace, checked_counts

__all__ = ["read_sglang"]


def read_sglang(path: Path) -> Trace | Arrays:
    """Read a dump of SGLang's recorder as a trace, or the plain tensors of another .pt, by name.

    Raises TraceError for another file, one with more than tensors and plain data, or no tokens.
    """
    # Its import takes seconds, and only a .pt needs it.
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message advises to run the file's code.
        raise TraceError(
            f"{path} holds more than tensors and plain data, or is damaged: dump it again"
        ) from error
    named = content if isinstance(content, dict) else {"": content}
    tensors = {str(n): v.detach().numpy for n, v in named.items() if isinstance(v, torch.Tensor)}
    if "logical_count" in named:
        counts = _array(named, path, "logical_count", 3)
    elif "records" in named:
        counts = _from_records(named, path)
    elif tensors:
        return tensors
    elif isinstance(content, dict):
        raise _wrong(path, f"holds {', '.join(map(str, content)) or 'nothing'}")
    else:
        raise _wrong(path, f"holds a {type(content).__name__}")
    counts = counts[counts.any(axis=(1, 2))]
    if not len(counts):
        raise TraceError(f"{path}: no token was recorded: start the recorder before the requests")
    return Trace(checked_counts(counts, path), {"source": path.name, "recorder": "SGLang"})


def _from_records(content: dict[Any, Any], path: Path) -> npt.NDArray[np.int64]:
    map_LP = _array(content, path, "last_physical_to_logical_map", 2)
    layers, experts = len(map_LP), int(map_LP.max(initial=0)) + 1
    if map_LP.min(initial=0) < 0:
        raise _wrong(path, "maps physical experts to negative ones")
    if experts > MOST_EXPERTS:
        raise _wrong(path, f"maps a physical expert to expert {experts - 1}")
    passes: dict[Any, npt.NDArray[np.int64]] = {}
    for record in content["records"]:
        if not isinstance(record, dict) or "forward_pass_id" not in record:
            raise _wrong(path, "holds records without a forward_pass_id")
        count_LP = _array(record, path, "global_physical_count", 2)
        if count_LP.shape != map_LP.shape:
            raise _wrong(
                path,
                f"has counts {count_LP.shape} for a map {map_LP.shape} of physical experts",
            )
        count_LE = passes.setdefault(
            record["forward_pass_id"], np.zeros((layers, experts), np.int64)
        )
        # Checked before the sum, which wraps around silently.
        checked_LP = checked_counts(count_LP[None], path)[0]
        np.add.at(count_LE, (np.arange(layers)[:, None], map_LP), checked_LP)
    return np.array([passes[key] for key in sorted(passes)]).reshape(-1, layers, experts)


def _array(content: dict[Any, Any], path: Path, name: str, dimensions: int) -> npt.NDArray[Any]:
    """Return a tensor of whole numbers as an array. Raises TraceError for anything else."""
    values = np.asarray(content.get(name))
    if values.ndim != dimensions or values.dtype.kind not in "iu":
        raise _wrong(path, f"has no {name} of whole numbers in {dimensions} dimensions")
    return values


def _wrong(path: Path, what: str) -> TraceError:
    return TraceError(
        f"{path} {what}: give a dump of SGLang's expert-distribution recorder (mode stat or per_pass)"
    )

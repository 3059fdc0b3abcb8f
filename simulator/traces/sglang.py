"""Reads dumps of SGLang's expert-distribution recorder as traces (`expert_distribution_recorder_*.pt`).

A .pt of something else may hold plain tensors, which are returned as they are.

`stat` and `stat_approx` dump {"logical_count": (buffered passes, L, E), ...}: one forward pass is one
iteration. Unfilled places of the ring buffer are zero and left out. If the buffer has wrapped around
(`--expert-distribution-recorder-buffer-size`; -1: unlimited), its oldest passes are lost and the order starts
somewhere in the middle.

`per_pass` and `per_token` dump {"records": [{"forward_pass_id", "global_physical_count": (L, P), ...}],
"last_physical_to_logical_map": (L, P)}, a file for each rank. Records of one pass are added up, physical
experts to logical ones by the last map.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError
from simulator.traces.arrays import MOST_EXPERTS, Arrays
from simulator.traces.torch_zip import read_torch_zip
from simulator.traces.trace import Trace, checked_counts

__all__ = ["read_sglang"]


def read_sglang(path: Path) -> Trace | Arrays:
    """Read a dump of SGLang's recorder as a trace, or the plain tensors of another .pt, by name.

    Raises TraceError for another file, or no tokens.
    """
    content = read_torch_zip(path)
    if isinstance(content, np.ndarray):
        return {"": lambda: content}
    if not isinstance(content, dict):
        raise _wrong(path, f"holds a {type(content).__name__}")
    if "logical_count" in content:
        counts = _array(content["logical_count"], path, "logical_count", 3)
    elif "records" in content:
        counts = _from_records(content, path)
    else:
        tensors = {
            str(name): partial(np.asarray, value)
            for name, value in content.items()
            if isinstance(value, np.ndarray)
        }
        if tensors:
            return tensors
        raise _wrong(path, f"holds {', '.join(map(str, content)) or 'nothing'}")
    counts = counts[counts.any(axis=(1, 2))]
    if not len(counts):
        raise TraceError(f"{path}: no token was recorded: start the recorder before the requests")
    return Trace(checked_counts(counts, path), {"source": path.name, "recorder": "SGLang"})


def _from_records(content: dict[Any, Any], path: Path) -> npt.NDArray[np.int64]:
    map_LP = _array(
        content.get("last_physical_to_logical_map"), path, "last_physical_to_logical_map", 2
    )
    layers, experts = len(map_LP), int(map_LP.max(initial=0)) + 1
    if map_LP.min(initial=0) < 0:
        raise _wrong(path, "maps physical experts to negative ones")
    if experts > MOST_EXPERTS:
        raise _wrong(path, f"maps a physical expert to expert {experts - 1}")
    passes: dict[Any, npt.NDArray[np.int64]] = {}
    for record in content["records"]:
        if not isinstance(record, dict) or "forward_pass_id" not in record:
            raise _wrong(path, "holds records without a forward_pass_id")
        count_LP = _array(record.get("global_physical_count"), path, "global_physical_count", 2)
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


def _array(value: Any, path: Path, name: str, dimensions: int) -> npt.NDArray[Any]:
    if (
        not isinstance(value, np.ndarray)
        or value.ndim != dimensions
        or value.dtype.kind not in "iu"
    ):
        raise _wrong(path, f"has no {name} of whole numbers in {dimensions} dimensions")
    return value


def _wrong(path: Path, what: str) -> TraceError:
    return TraceError(
        f"{path} {what}: give a dump of SGLang's expert-distribution recorder (mode stat or per_pass)"
    )

"""Program that compiles a pass: `python -m MODULE PARENT CHECKPOINT THREADS`.

torch.export traces the model with the cache and the routed experts as opaque operators, and inductor compiles
the rest ahead of time, with the weights packed for oneDNN or with products of `dense`. The number of tokens
stays variable.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from attention_client.engines.transformers.compiled.store import (
    LIBRARY,
    OPERATORS,
    building,
    key_of,
    remove_old,
)
from attention_client.engines.transformers.dense.weights import multiplies_here
from attention_client.engines.transformers.model import load_model, serving_dtype
from attention_client.engines.transformers.paged.model import use_paged_attention
from attention_client.engines.transformers.rotary import length_rotaries
from eaas.checkpoint import Checkpoint
from eaas.parent_death import end_with_parent

__all__ = ["main"]

_MOST_TOKENS = 1 << 16
# Beside serving on all cores, the lowest priority would never end: at 5 it gets a fifth of a core.
_NICE = 5


class _Pass(torch.nn.Module):
    """A pass as `PagedModel` calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            logits_to_keep=rows,
            use_cache=False,
        ).logits
        return logits


def main(parent: int, path: Path, threads: int) -> None:
    """Compile the pass of a checkpoint into the store, unless it is there. Ends with the process `parent`."""
    end_with_parent(parent, signal.SIGKILL, "the attention client")
    os.nice(_NICE)
    torch.set_num_threads(threads)
    checkpoint = Checkpoint.open(path)
    with building(key_of(checkpoint, threads)) as work:
        if work is not None:
            _compile(checkpoint, threads, work)
    remove_old()


@torch.no_grad()
def _compile(checkpoint: Checkpoint, threads: int, work: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._inductor

    model = load_model(checkpoint, None, dtype=serving_dtype(checkpoint))
    use_paged_attention(model)
    length_rotaries(model)
    tokens = torch.export.Dim("tokens", min=1, max=_MOST_TOKENS)
    rows = torch.export.Dim("rows", min=1, max=_MOST_TOKENS)
    # Neither size is 1 or equal to the other, which torch would take for a rule.
    example = (torch.arange(16)[None], torch.arange(16)[None], torch.arange(5))
    exported = torch.export.export(
        _Pass(model),
        example,
        dynamic_shapes=({1: tokens}, {1: tokens}, {0: rows}),
        strict=False,
    )
    graph = exported.module()
    if multiplies_here():
        _use_own_products(graph)
    options = {
        "freezing": True,
        "cpp.enable_concat_linear": True,
        "cpp.threads": threads,
        "aot_inductor.output_path": str(work / LIBRARY),
    }
    torch._inductor.aot_compile(graph, example, options=options)
    (operators,) = work.glob("*.wrapper.json")
    operators.rename(work / OPERATORS)
    for left in list(work.iterdir()):
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name not in (LIBRARY, OPERATORS):
            left.unlink()


def _use_own_products(graph: torch.fx.GraphModule) -> None:
    """Replace torch's products with matrices in bfloat16 by those of `dense`."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        if node.meta["val"].dtype is torch.bfloat16:
            node.target = torch.ops.eaas.linear.default
            node.args = (*node.args, None)[:3]
    graph.recompile()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

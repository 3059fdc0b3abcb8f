"""Compiles kernel `triton` for GPUs that are not here and prints what each program needs, a JSON line each.

    python tests/helpers/compile_ahead.py [--candidates] sm_80 sm_90 ...

Of the first GPU all programs and one that spills, so that the reader sees that spills are noticed; of the
others, of each coding the program that needs most. With `--candidates`, the programs of all tiles that
`eaas bench experts --tune` may choose, for each GPU.
Runs in a process of its own, because Triton decides at its import whether to compile or to interpret.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from expert_server.kernels.activation import Activation, ActivationKind
from expert_server.kernels.gpu import products
from expert_server.kernels.gpu.tiles import (
    STEPS,
    SUM_COLUMNS,
    SUM_TOKENS,
    TILES,
    Coding,
    candidates,
)

# The assembler then prints what a program needs.
triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.disable_line_info = True
_POINTERS = {
    **dict.fromkeys(("table", "tile_expert", "tile_start", "tile_end", "order"), "*i64"),
    **{"ids": "*i32", "scores": "*fp32", "out": "*fp32"},
}
# Sizes that torch's allocator and usual models make multiples of 16; Triton then loads 16 bytes at once.
_OPTIONS = {"enable_fp_fusion": True}
_NOT_MULTIPLES = ("tokens", "top_k")
DOWN = {"IS_UP": False, "KIND": 0, "HAS_GATE": False, "ALPHA": 0.0, "LIMIT": 0.0}


def programs(
    with_candidates: bool = False,
) -> Iterator[tuple[Any, str, dict[str, Any], dict[str, int]]]:
    """Yield device functions: function, dtype of hidden states, constants, options."""
    for coding, tiles in TILES.items():
        dtype = "fp32" if coding is Coding.FLOAT32 else "bf16"
        all_tiles = [tile for bucket in candidates(coding).values() for tile in bucket]
        for tile in all_tiles if with_candidates else tiles.values():
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            shape = {
                "CODING": int(coding),
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "STEP": STEPS[coding],
                "HAS_BIAS": True,
            }
            # The activation with the most operations.
            form = constants(Activation(ActivationKind.CLAMPED_SWIGLU, True, True, 1.702, 7.0))
            yield products.product, dtype, shape | form, options
            yield products.product, dtype, shape | DOWN, options
            if coding is Coding.BFLOAT16 and tile is tiles["few"]:
                for kind, has_gate in ((ActivationKind.SILU, True), (ActivationKind.GELU, False)):
                    form = constants(Activation(kind, has_gate))
                    yield products.product, dtype, shape | form, options
    for dtype in ("bf16", "fp32"):
        yield products.combine, dtype, {"TOKENS": SUM_TOKENS, "COLUMNS": SUM_COLUMNS}, {}


def constants(form: Activation) -> dict[str, Any]:
    """Constants of an activation, as the kernel passes them."""
    return {
        "IS_UP": True,
        "KIND": int(form.kind),
        "HAS_GATE": form.has_gate,
        "ALPHA": form.alpha,
        "LIMIT": form.limit,
    }


def compile_for(
    architecture: int, function: Any, dtype: str, fixed: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    """Compile a function and read off the assembler's log what it needs."""
    signature = {
        parameter.name: "constexpr"
        if parameter.is_constexpr
        else f"*{dtype}"
        if parameter.name in ("x", "y") or (parameter.name == "out" and "IS_UP" in fixed)
        else _POINTERS.get(parameter.name, "i32")
        for parameter in function.params
    }
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(signature)
        if signature[name] != "constexpr" and name not in _NOT_MULTIPLES
    }
    source = ASTSource(function, signature, fixed, attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            source, target=GPUTarget("cuda", architecture, 32), options=options | _OPTIONS
        )
    used = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*"
        r"Used (\d+) registers",
        log.getvalue(),
        re.DOTALL,
    )
    assert used is not None, log.getvalue()
    ptx = compiled.asm["ptx"]
    return {
        "function": function.fn.__name__,
        "architecture": architecture,
        "dtype": dtype,
        "constants": fixed,
        "threads": 32 * compiled.metadata.num_warps,
        "registers": int(used[4]),
        "stack": int(used[1]),
        "spills": int(used[2]) + int(used[3]),
        "shared": compiled.metadata.shared,
        "tensor_cores": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx)),
        "asynchronous_copies": len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
    }


def spilling() -> tuple[Any, str, dict[str, Any], dict[str, int]]:
    """Return a program that needs more registers than there are: a large tile for one warp."""
    function, dtype, fixed, options = next(programs())
    return function, dtype, fixed | {"ROWS": 64}, options | {"num_warps": 1}


if __name__ == "__main__":
    with_candidates = "--candidates" in sys.argv
    chosen = list(programs(with_candidates))
    # The tiles for many tokens come last.
    activated = [each for each in chosen if each[2].get("KIND") == ActivationKind.CLAMPED_SWIGLU]
    largest = {each[2]["CODING"]: each for each in activated}.values()
    for number, name in enumerate(word for word in sys.argv[1:] if word.startswith("sm_")):
        asked = chosen if with_candidates else largest if number else [*chosen, spilling()]
        for program in asked:
            print(json.dumps(compile_for(int(name.removeprefix("sm_")), *program)), flush=True)

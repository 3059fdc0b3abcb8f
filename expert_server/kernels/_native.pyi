"""Types of the compiled module (`native/module.c`)."""

Pool = object
Layer = tuple[int, Pool | None, int, int, int, int, tuple[int, bool, float, float], int]

def create_pool(threads: int, learns: bool = False, /) -> Pool: ...
def kinds() -> list[tuple[int, str, int, int]]: ...
def scratch_bytes(
    kind: int,
    threads: int,
    hidden: int,
    intermediate: int,
    tokens: int,
    top_k: int,
    num_experts: int,
    /,
) -> int: ...
def run(
    layer: Layer,
    x: tuple[int, int],
    ids: tuple[int, bool],
    scores: int,
    tokens: int,
    top_k: int,
    out: int,
    scratch: int,
    /,
) -> int: ...
def prepare(layer: Layer, scratch: tuple[int, int], kept: object, /) -> object: ...
def read(pool: Pool | None, address: int, nbytes: int, /) -> None: ...
def pack(rows: int, stride: int, n: int, words: int, out: int, panel_words: int, /) -> None: ...
def pack_quantized(
    format: int,
    inputs: int,
    group: int,
    codes: tuple[int, int],
    scales: tuple[int, int],
    zeros: tuple[int, int, int],
    n: int,
    out: int,
    panel_words: int,
    /,
) -> bool: ...
def formats() -> list[tuple[str, int, bool, bool]]: ...
def panel_bytes(format: int, inputs: int, /) -> int: ...

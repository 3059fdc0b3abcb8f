"""Types of the compiled module (`native/module.c`)."""

Pool = object

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
    kind: int,
    pool: Pool | None,
    experts: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    activation: tuple[int, bool, float, float],
    x: tuple[int, int],
    ids: tuple[int, bool],
    scores: int,
    tokens: int,
    top_k: int,
    out: int,
    scratch: int,
    counts: int,
    /,
) -> int: ...
def prepare(
    kind: int,
    pool: Pool | None,
    experts: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    activation: tuple[int, bool, float, float],
    scratch: tuple[int, int],
    counts: int,
    kept: object,
    /,
) -> object: ...
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
def formats() -> dict[str, int]: ...
def panel_bytes(format: int, inputs: int, /) -> int: ...
